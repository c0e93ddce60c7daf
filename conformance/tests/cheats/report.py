"""``cheats``: each cheat certified as a user would, in one process and apart, and what came of it.

As data, as lines for a terminal, and as the table of the threat model.
"""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from mla_conformance.driving.sources import judging_sources
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.pool import Limits
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.expectations.apply import Expectations, shipped
from mla_conformance.files.inputs import decode
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.files.outputs import Section
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import write_json
from mla_conformance.report.terminal import say
from mla_conformance.tests.cheats.cheat import EXPECTED, FAMILIES, RIGHT, Cheat, cheats

_STORED = "cheats.json"
_THROUGH = "gets through"
_WRONG = r".*(output|LSE) is \S+ at request.*"
SALT = "chosen-when-it-was-written"
"""With it inputs are drawn that no cheat has seen before."""
_SECONDS = 60.0
_TRIES = 5
"""Runs of a cheat that should get through."""


@dataclass(frozen=True)
class Outcome:
    """What came of a cheat.

    Attributes:
        alone: the sentence that a user sees where kernel and judge share a process; empty if it gets through.
        apart: the same where they are in processes of their own.
    """

    alone: str
    apart: str

    def is_of(self, cheat: Cheat) -> bool:
        """Whether that is what was expected."""
        return all(
            expected in said if expected else not said
            for expected, said in ((cheat.alone, self.alone), (cheat.apart, self.apart))
        )


def try_all(cheats: Sequence[Cheat]) -> list[Outcome]:
    """A run of each one's case in each way, as many at once as there are cores, up to four."""
    references, cases = [cheat.reference for cheat in cheats], [cheat.case for cheat in cheats]
    salts = [SALT if cheat.salted else "" for cheat in cheats]
    with ProcessPoolExecutor(max(1, min(4, os.cpu_count() or 1)), get_context("spawn")) as pool:
        alone = pool.map(certified_once, references, cases, [1 if cheat.alone else _TRIES for cheat in cheats])
        apart = pool.map(certified, references, cases, repeat(True), salts)
        return list(map(Outcome, alone, apart))


def certified_once(reference: str, case: str, tries: int) -> str:
    """Why a backend is not certified in any of so many runs; empty if it is in one: some race against the judge."""
    for _ in range(tries):
        said = certified(reference, case)
        if not said:
            break
    return said


def certified(reference: str, case: str, apart: bool = False, salt: str = "") -> str:
    """Why a backend is not certified on a case, as a user is told; empty if it is."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / EXPECTED).mkdir()
        expectations = Expectations.load([shipped(), folder / EXPECTED])
        request = RunRequest.of([reference], device="cpu", cases=[case], salt=salt, apart=apart)
        with Run(request, RunFolder.claim(folder / "run"), Limits(1, _SECONDS), expectations) as run:
            run.prepare()
            run.begin()
            run.judge()
            ((record,),) = (backend.records for backend in run.summary().backends)
    return sentence(record)


def sentence(record: Record) -> str:
    """Why a kernel with this record is not certified; empty if it can be."""
    if record.status is Status.UNSUPPORTED:
        lacking = dict(MustPass.of_suite().missing({record.case: record}))
        return f"must-pass case {record.case} did not pass: {lacking[record.case]}" if record.case in lacking else ""
    return "" if record.status is Status.PASS else record.message


class CheatReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a run over all cheats.

    Attributes:
        digest: of everything that decides it.
        outcomes: by name of the cheat.
    """

    digest: str
    outcomes: dict[str, Outcome]

    @property
    def unexpected(self) -> list[str]:
        """Names of the cheats that fare otherwise than their class says, or of which nothing is known."""
        return [
            name
            for name, entry in cheats().items()
            if name not in self.outcomes or not self.outcomes[name].is_of(entry)
        ]


def run_cheats() -> CheatReport:
    """Try them all."""
    digest = deciding_digest()
    return CheatReport(digest, dict(zip(cheats(), try_all(list(cheats().values())), strict=True)))


def deciding_digest() -> str:
    """Digest of the judge, of what carries out a run, and of the cheats."""
    root = Path(str(files("mla_conformance")))
    rooms = [path for room in ("apart", "engine") for path in sorted((root / room).glob("*.py"))]
    own = [root / "tests" / "cheats" / f"{name}.py" for name in (*FAMILIES, "cheat", "report")]
    return meaning_digest([*judging_sources(), *rooms, *own])[:16]


def stored() -> CheatReport:
    """The report of the last run that was committed."""
    return decode((files("mla_conformance.fixtures") / _STORED).read_text(encoding="utf-8"), CheatReport, _STORED)


def try_cheats(options: argparse.Namespace) -> int:
    """Try them all, say and write what came of it; the exit status is 1 if one fares otherwise than expected."""
    table = Section.of(options.table, "cheats") if options.table else None  # known before anything is run
    report = run_cheats()
    if options.out:
        write_json(options.out, msgspec.to_builtins(report))
    if table:
        table.write(markdown(report))
    for line in terminal_lines(report):
        say(line)
    return 1 if report.unexpected else 0


def terminal_lines(report: CheatReport) -> Iterator[str]:
    """A cheat in each line, in one process and apart."""
    for name in cheats():
        found = report.outcomes[name]
        sign = "✘" if name in report.unexpected else "✔"
        yield f"{sign} {name:<26} in one process: {_short(found.alone)} · apart: {_short(found.apart)}"
    yield closing_line(report)


def closing_line(report: CheatReport) -> str:
    """All of them in one line."""
    caught = {way: sum(bool(getattr(found, way)) for found in report.outcomes.values()) for way in ("alone", "apart")}
    total = len(report.outcomes)
    return (
        f"{total} cheats: {caught['alone']} caught in one process, {caught['apart']} apart · "
        f"{len(report.unexpected)} otherwise than expected"
    )


def markdown(report: CheatReport) -> str:
    """The section of the threat model: the table, and why some are not caught."""
    rows = [_row(entry, report.outcomes[name]) for name, entry in cheats().items()]
    head = ["| cheat | attempts | claims | in one process | apart |", "|---|---|---|---|---|"]
    through: dict[str, list[str]] = {}
    for entry in cheats().values():
        if entry.trust:
            through.setdefault(entry.trust, []).append(f"`{entry.name}`")
    reasons = [f"- {', '.join(names)}: {reason}" for reason, names in through.items()]
    return "\n".join(
        [
            f"{closing_line(report)}. Where no claim is named, it is {RIGHT}.",
            "",
            *head,
            *rows,
            "",
            "Not caught apart, and why:",
            "",
            *reasons,
        ]
    )


def _row(entry: Cheat, found: Outcome) -> str:
    salted = " (with a salt)" if entry.salted else ""
    apart = "likewise" if found.alone and found.apart == found.alone else _short(found.apart)
    claims = "" if entry.claims == RIGHT else entry.claims
    cells = (f"`{entry.name}`", entry.attempt, claims, _short(found.alone), apart + salted)
    return f"| {' | '.join(cells)} |"


def _short(said: str) -> str:
    """What a user is told; of wrong numbers, in which part of the result."""
    return "caught: " + re.sub(_WRONG, r"wrong \1", said) if said else _THROUGH
