"""Each cheat certified as a user would: data, lines for a terminal, the table of the threat model."""

import argparse
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from mla_conformance.driving.loaded import judging_sources
from mla_conformance.engine.journal import RunFolder
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits
from mla_conformance.expectations import KNOWN_FAILURES, Expectations
from mla_conformance.files.installed import meaning_digest
from mla_conformance.files.whole import decode, section_of, write_output, write_section
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record, Status
from mla_conformance.report.json_report import to_text
from mla_conformance.report.terminal import say
from mla_conformance.tests.cheats.cheat import EXPECTED, FAMILIES, Cheat, cheats

_STORED = "cheats.json"
SALT = "chosen-when-it-was-written"  # with it inputs are drawn that no cheat has seen before


def certified(reference: str, case: str, salt: str = "") -> str:
    """Why a backend is not certified on a case, as a user is told; empty if it is."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / EXPECTED).mkdir()
        expectations = Expectations.load([KNOWN_FAILURES, folder / EXPECTED])
        request = RunRequest.of([reference], device="cpu", cases=[case], salt=salt)
        with Run(request, RunFolder.claim(folder / "run"), Limits(1, 60.0), expectations) as run:
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
    digest: str  # of everything that decides it
    outcomes: dict[str, str]  # the sentence that a user sees, by name of the cheat; empty if it gets through

    @property
    def unexpected(self) -> list[str]:
        """Names of the cheats that fare otherwise than their class says, or of which nothing is known."""
        return [name for name, entry in cheats().items() if not self._is_expected(entry)]

    def _is_expected(self, entry: Cheat) -> bool:
        said = self.outcomes.get(entry.name)
        return said is not None and (entry.caught in said if entry.caught else not said)


def run_cheats() -> CheatReport:
    """A run of each one's case, as many at once as there are cores, up to four."""
    digest, entries = deciding_digest(), cheats().values()
    asked = zip(*((each.reference, each.case, SALT if each.salted else "") for each in entries), strict=True)
    with ProcessPoolExecutor(max(1, min(4, os.cpu_count() or 1)), get_context("spawn")) as pool:
        return CheatReport(digest, dict(zip(cheats(), pool.map(certified, *asked), strict=True)))


def deciding_digest() -> str:
    """Digest of the judge, of what carries out a run, and of the cheats."""
    root = Path(str(files("mla_conformance")))
    rooms = [path for room in ("driving", "engine") for path in sorted((root / room).glob("*.py"))]
    own = [root / "tests" / "cheats" / f"{name}.py" for name in (*FAMILIES, "cheat", "report")]
    return meaning_digest([*judging_sources(), *rooms, *own])[:16]


def stored() -> CheatReport:
    """The report of the last run that was committed."""
    return decode((files("mla_conformance.fixtures") / _STORED).read_text(encoding="utf-8"), CheatReport, _STORED)


def try_cheats(options: argparse.Namespace) -> int:
    if options.table:
        section_of(options.table, "cheats")  # it is there before anything is run
    report = run_cheats()
    if options.out:
        write_output(options.out, to_text(report))
    if options.table:
        write_section(options.table, "cheats", markdown(report))
    for line in terminal_lines(report):
        say(line)
    return 1 if report.unexpected else 0


def terminal_lines(report: CheatReport) -> Iterator[str]:
    for name in cheats():
        sign, said = "✘" if name in report.unexpected else "✔", report.outcomes[name]
        # Of wrong numbers, in which part of the result.
        caught = "caught: " + re.sub(r".*(output|LSE) is \S+ at request.*", r"wrong \1", said)
        yield f"{sign} {name:<26} {caught if said else 'gets through'}"
    yield closing_line(report)


def closing_line(report: CheatReport) -> str:
    caught = sum(map(bool, report.outcomes.values()))
    return f"{len(report.outcomes)} cheats: {caught} caught · {len(report.unexpected)} otherwise than expected"


def markdown(report: CheatReport) -> str:
    """The section of the threat model: what is not caught, and why."""
    through: dict[str, list[Cheat]] = {}
    for entry in (entry for name, entry in cheats().items() if not report.outcomes[name]):
        through.setdefault(entry.trust, []).append(entry)
    rows = [f"| {', '.join(f'`{each.name}`' for each in group)} | {trust} |" for trust, group in through.items()]
    head = ["| not caught | why |", "|---|---|"]
    return "\n".join([f"{closing_line(report)}.", "", *head, *rows])
