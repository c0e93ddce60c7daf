"""What fenced memory costs: the cases of ``memory_bounds`` beside the same calls over memory without fences."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_conformance.cases.case import Case
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.fences import Side
from mla_conformance.report.terminal import counted
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial

CAPABILITY = "memory_bounds"


@dataclass(frozen=True)
class Spent:
    """Seconds of cases, from their inputs to their verdicts, and of the calls in them."""

    whole: float = 0.0
    calls: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.whole + other.whole, self.calls + other.calls)


def cost(subject: Subject, cases: Sequence[Case]) -> Iterator[str]:
    """Lines on both times of the cases that a backend passes, and what of them is not measured.

    Each is judged once before, so that nothing is compiled while it is measured.
    """
    fenced, plain, count = Spent(), Spent(), 0
    for case in cases:
        status = judge_one(subject, case, Context()).status
        if status is Status.PASS:
            fenced, plain, count = fenced + _fenced(subject, case), plain + _plain(subject, case), count + 1
        elif status is not Status.UNSUPPORTED:
            yield f"{subject.name}, {case.id}: {status}, not measured"
        if subject.executor.lost(subject.device):
            yield f"{subject.name}: the GPU's context is lost, nothing more is measured"
            break
    if count:
        yield (
            f"{subject.name}, {counted(count, 'case')} with no memory beside the operands: "
            f"{fenced.whole:.2f} s, {fenced.whole / plain.whole:.2f} times those of the same calls without; "
            f"the calls alone {fenced.calls:.2f} s, {fenced.calls / plain.calls:.2f} times"
        )


def _fenced(subject: Subject, case: Case) -> Spent:
    began = time.perf_counter()
    record = judge_one(subject, case, Context())
    return Spent(time.perf_counter() - began, record.phases["calls"])


def _plain(subject: Subject, case: Case) -> Spent:
    """As many calls of the case, each judged, over memory as any other capability hands it over."""
    subject.executor.begin()
    began, trial = time.perf_counter(), Trial(subject, case, Context())
    trial.require_support()
    for _ in Side:
        trial.conforms()
    return Spent(time.perf_counter() - began, trial.clock.spent["calls"])
