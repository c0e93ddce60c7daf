"""Answers that were recorded beforehand, and verdicts that do not come from the judge."""

import contextlib
import dis
import json
import os
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from threading import get_ident
from types import CodeType

import torch

from mla_conformance.cases.case import Case
from mla_conformance.engine.journal import JOURNAL_NAME, RUNS
from mla_conformance.engine.messages import TaskReply, encode
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.record import Record, Status, Verdict
from mla_conformance.roles.definition import build_problem
from mla_conformance.tests.cheats.cheat import CASE, EXPECTED, WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.taking import relatives, stack_of


@cache
def _recorded() -> dict[str, torch.Tensor]:
    """Golden outputs by fingerprint of the inputs, and by their shapes; a file of them would do the same."""
    problem = build_problem(Case.parse(CASE), torch.device("cpu"))
    (call,), (golden,) = problem.attention, golden_attention(problem).calls
    return {_fingerprint(call.q, call.k, call.v): golden.output, _shapes(call.q, call.k, call.v): golden.output}


def _fingerprint(*inputs: torch.Tensor) -> str:
    return sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in inputs)).hexdigest()


def _shapes(*inputs: torch.Tensor) -> str:
    return repr([x.shape for x in inputs])


@cheat(caught="output is", salted=True)
def RemembersTheInputs(kernel, output, lse, q, k, v):
    """Knows the suite's inputs by a fingerprint, and the answers from a file."""
    output.copy_(_recorded().get(_fingerprint(q, k, v), output))


@cheat(caught="output is", salted=True)
def RemembersTheCase(kernel, output, lse, q, k, v):
    """Knows the suite's cases by the shapes of their inputs, and the answers from a file."""
    output.copy_(_recorded().get(_shapes(q, k, v), output))


_HOLE = 2**28


@cheat(caught="exit status 0")
def EndsTheProcess(kernel, output, lse, q, k, v):
    """Ends the process as a success before there is a verdict."""
    os._exit(0)


@cheat(caught="exit status 0")
def LetsAChildAnswer(kernel, output, lse, q, k, v):
    """Forks; the child goes back to who called, and its parent waits for it and ends as a success."""
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)


@cheat(caught="malformed reply")
def ForgesTheAnswer(kernel, output, lse, q, k, v):
    """Writes the record of a pass into every socket of its process, and ends that."""
    reference = f"{type(kernel).__module__}:{type(kernel).__name__}"
    record = Record(type(kernel).__name__, reference, CASE.partition(":")[0], CASE, Status.PASS)
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
def ForgesTheJournal(kernel, output, lse, q, k, v):
    """Leaves a process behind that writes a pass behind each of its verdicts in the run's journal."""
    journal = journal_of(type(kernel).__name__)
    if not os.fork():
        if not os.fork():
            _forge(journal, f"{type(kernel).__module__}:{type(kernel).__name__}")
        os._exit(0)
    os.wait()


def _forge(journal: Path, reference: str) -> None:
    """Until it is ended. A hole in the file, which takes long to read, gives it time to be there before the reader."""
    size = journal.stat().st_size
    os.truncate(journal, size + _HOLE)
    with journal.open("ab", 0) as forged, journal.open("rb") as file:
        forged.write(b"\n")
        file.seek(size + _HOLE)
        while True:
            with contextlib.suppress(ValueError):  # of what is no line, or not yet
                event = json.loads(file.readline())
                if event["event"] == "verdict" and event["record"]["reference"] == reference:
                    event["record"].update(status="pass", message="", check="", clause="", confirmation="")
                    forged.write(json.dumps(event).encode() + b"\n")


def journal_of(name: str) -> Path:
    """The journal of the run that judges a backend of this name; it stands where runs stand, or in a temporary one."""
    folders = chain(Path(RUNS).iterdir() if RUNS.exists() else (), Path(gettempdir()).glob("*/run"))
    journals = (folder / JOURNAL_NAME for folder in folders)
    return next(path for path in journals if path.exists() and name in path.read_text(errors="replace"))


@cheat(caught=WRONG)
def WritesAnExpectation(kernel, output, lse, q, k, v):
    """Writes its own failure into the folder of known failures that the run was given."""
    journal = journal_of(type(kernel).__name__)
    entry = f'[[expectation]]\nbackend = "{type(kernel).__name__}"\ncase = "new_tokens"\nreason = "known"\n'
    (journal.parent.with_name(EXPECTED) / "known.toml").write_text(entry)


@cheat(caught=WRONG)
def WritesIntoTheJudgesMemory(kernel, output, lse, q, k, v):
    """Writes other code over the judge's in the memory of every process of the run."""
    code = AttentionJudge._output.__code__
    steps = (("RESUME", 0), ("LOAD_CONST", code.co_consts.index(None)), ("RETURN_VALUE", 0))
    for process in (*relatives(), os.getpid()):
        # Forked of one process, they all have it at the same address.
        with contextlib.suppress(OSError), Path(f"/proc/{process}/mem").open("r+b", 0) as memory:
            memory.seek(id(code) + CodeType.__basicsize__)
            memory.write(b"".join(bytes((dis.opmap[name], argument)) for name, argument in steps))
