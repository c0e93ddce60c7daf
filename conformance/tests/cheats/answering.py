"""Verdicts that do not come from the judge."""

import contextlib
import dis
import json
import os
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from threading import get_ident
from types import CodeType

from mla_conformance.engine.folder import RUNS
from mla_conformance.engine.journal import JOURNAL_NAME
from mla_conformance.engine.messages import TaskReply, encode
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status, Verdict
from mla_conformance.tests.cheats.cheat import CASE, EXPECTED, WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.searching import relatives, stack_of

_HOLE = 2**28


@cheat(caught="exit status 0")
class EndsTheProcess(ThreeTimes):
    """Ends the process as a success before there is a verdict."""

    def answer(self, output, lse, q, k, v):
        os._exit(0)


@cheat(caught="exit status 0")
class LetsAChildAnswer(ThreeTimes):
    """Forks; the child goes back to who called, and its parent waits for it and ends as a success."""

    def answer(self, output, lse, q, k, v):
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)
        return output, lse


@cheat(caught="malformed reply")
class ForgesTheAnswer(ThreeTimes):
    """Writes the record of a pass into every socket of its process, and ends that."""

    def answer(self, output, lse, q, k, v):
        reference = f"{type(self).__module__}:{type(self).__name__}"
        record = Record(type(self).__name__, reference, CASE.partition(":")[0], CASE, Status.PASS)
        for link in Path("/proc/self/fd").iterdir():
            if link.is_socket():
                os.write(int(link.name), encode(TaskReply(record, leaves=True)))
        os._exit(0)


@cheat(caught=WRONG)
class ChangesTheVerdict(ThreeTimes):
    """Is asked for evidence when the verdict is known, and changes that."""

    def kernel_evidence(self):
        for frame in stack_of(get_ident()):
            for value in frame.f_locals.values():
                if isinstance(value, Verdict):
                    for name, passing in vars(Verdict(Status.PASS)).items():
                        object.__setattr__(value, name, passing)
        return {}


@cheat(caught=WRONG)
class ForgesTheJournal(ThreeTimes):
    """Leaves a process behind that writes a pass behind each of its verdicts in the run's journal."""

    def answer(self, output, lse, q, k, v):
        journal = journal_of(type(self).__name__)
        if not os.fork():
            if not os.fork():
                _forge(journal, f"{type(self).__module__}:{type(self).__name__}")
            os._exit(0)
        os.wait()
        return output, lse


def _forge(journal: Path, reference: str) -> None:
    """Until it is ended. A hole in the file, which takes long to read, gives it time to be there before the reader."""
    size = journal.stat().st_size
    os.truncate(journal, size + _HOLE)
    with journal.open("ab", 0) as forged, journal.open("rb") as file:
        forged.write(b"\n")
        file.seek(size + _HOLE)
        while True:
            event = _event(file.readline())
            if event.get("event") == "verdict" and event["record"]["reference"] == reference:
                event["record"].update(status="pass", message="", check="", clause="", confirmation="")
                forged.write(json.dumps(event).encode() + b"\n")


def _event(line: bytes) -> dict:
    try:
        return json.loads(line)
    except ValueError:
        return {}


def journal_of(name: str) -> Path:
    """The journal of the run that judges a backend of this name; it stands where runs stand, or in a temporary one."""
    folders = chain(Path(RUNS).iterdir() if RUNS.exists() else (), Path(gettempdir()).glob("*/run"))
    journals = (folder / JOURNAL_NAME for folder in folders)
    return next(path for path in journals if path.exists() and name in path.read_text(errors="replace"))


@cheat(caught=WRONG)
class WritesAnExpectation(ThreeTimes):
    """Writes its own failure into the folder of known failures that the run was given."""

    def answer(self, output, lse, q, k, v):
        journal = journal_of(type(self).__name__)
        entry = f'[[expectation]]\nbackend = "{type(self).__name__}"\ncase = "new_tokens"\nreason = "known"\n'
        (journal.parent.with_name(EXPECTED) / "known.toml").write_text(entry)
        return output, lse


@cheat(caught=WRONG)
class WritesIntoTheJudgesMemory(ThreeTimes):
    """Writes other code over the judge's in the memory of every process of the run."""

    def answer(self, output, lse, q, k, v):
        code = AttentionJudge._output.__code__
        steps = (("RESUME", 0), ("LOAD_CONST", code.co_consts.index(None)), ("RETURN_VALUE", 0))
        for process in (*relatives(), os.getpid()):
            # Forked of one process, they all have it at the same address.
            with contextlib.suppress(OSError), Path(f"/proc/{process}/mem").open("r+b", 0) as memory:
                memory.seek(id(code) + CodeType.__basicsize__)
                memory.write(b"".join(bytes((dis.opmap[name], argument)) for name, argument in steps))
        return output, lse
