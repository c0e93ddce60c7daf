"""Certifying each cheat as a user would, in one process and apart."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from mla_conformance.cheats.cheat import EXPECTED, Cheat
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.request import Request
from mla_conformance.engine.run import Limits, Run
from mla_conformance.expectations.apply import Expectations, shipped
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status

SALT = "chosen-when-it-was-written"
"""With it inputs are drawn that no cheat has seen before."""
_SECONDS = 60.0


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
        alone = pool.map(certified, references, cases)
        apart = pool.map(certified, references, cases, repeat(True), salts)
        return list(map(Outcome, alone, apart))


def certified(reference: str, case: str, apart: bool = False, salt: str = "") -> str:
    """Why a backend is not certified on a case, as a user is told; empty if it is."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / EXPECTED).mkdir()
        expectations = Expectations.load([shipped(), folder / EXPECTED])
        request = Request.of([reference], device="cpu", cases=[case], salt=salt, apart=apart)
        with Run(request, RunFolder.claim(folder / "run"), Limits(1, _SECONDS), expectations) as run:
            run.prepare()
            run.begin()
            run.judge(lambda record: None)
            ((record,),) = (backend.records for backend in run.summary().backends)
    return sentence(record)


def sentence(record: Record) -> str:
    """Why a kernel with this record is not certified; empty if it can be."""
    if record.status is Status.UNSUPPORTED:
        lacking = dict(MustPass.of_suite().missing({record.case: record}))
        return f"must-pass case {record.case} did not pass: {lacking[record.case]}" if record.case in lacking else ""
    return "" if record.status is Status.PASS else record.message
