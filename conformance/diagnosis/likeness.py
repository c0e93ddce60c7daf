"""How alike two failures of the same case are: of the numbers that one got wrong, the share that are alike.

Or the share of the error that the other one shows as well, whichever is less, in the output or LSE where it is least.
"""

from dataclasses import dataclass

import torch

from mla_conformance.judging.record import Record
from mla_conformance.judging.steps import Measured
from mla_conformance.roles.table import measure
from mla_conformance.trials.trial import Trial

_OUTPUT_DIMS = 3
_ROUNDED = 2**-7
"""Part of a row's error by which two kernels that make the same mistake may differ: P and the output are rounded to
2^-9 of themselves in bf16, each by both."""


@dataclass(frozen=True)
class Behaviour:
    failure: tuple[str, str, str]  # what failed and where in the procedure; empty if the case passed
    # every output and LSE of the step that was judged last; none where they have not the right form
    numbers: tuple[Measured, ...]

    @staticmethod
    def of(trial: Trial, record: Record) -> "Behaviour":
        if not record.failed or trial.last is None:
            return Behaviour(("", "", ""), ())
        step = record.message.partition(":")[0]
        return Behaviour((record.check, step, trial.last.problem.key), tuple(numbers_of(trial)))

    @property
    def is_wrong(self) -> bool:
        return any(bool(wrong_numbers(each).any()) for each in self.numbers)

    @property
    def is_numeric(self) -> bool:
        """Whether something finite is wrong."""
        return any(bool((wrong_numbers(each) & each.got.isfinite()).any()) for each in self.numbers)


def numbers_of(trial: Trial) -> list[Measured]:
    last = trial.last
    return measure(last.problem, last.expectation, last.observation, trial.declaration) if last else []


def likeness(observed: Behaviour, suspected: Behaviour) -> float:
    """1 for the same failure, 0 for none of it; both from the same case."""
    if observed.failure != suspected.failure or not observed.numbers:
        return 0.0
    if len(observed.numbers) != len(suspected.numbers):
        return 0.0
    return min(_alike(mine, theirs) for mine, theirs in zip(observed.numbers, suspected.numbers, strict=True))


def _alike(a: Measured, b: Measured) -> float:
    """Likeness of one output or LSE; 1 where neither is wrong. What the observed kernel may round decides for both."""
    wrong = wrong_numbers(a) | _differ(b.got, b.golden, a.allowed)
    margin, error = 2 * a.allowed, a.got - a.golden
    if a.got.dim() >= _OUTPUT_DIMS:  # what roundings of a wrong output [T, N, V] may make of each row's numbers
        rms = torch.where(error.isfinite(), error, 0.0).square().mean(dim=-1, keepdim=True).sqrt()
        margin = margin + _ROUNDED * rms
    unlike = _differ(a.got, b.got, margin) & wrong
    if not bool(wrong.any()):
        return 1.0
    counted = 1.0 - float(unlike.sum()) / float(wrong.sum())
    whole = _norm(error, wrong)
    return min(counted, 1.0 - _norm(a.got - b.got, unlike) / whole if whole else counted)


def wrong_numbers(measured: Measured) -> torch.Tensor:
    return _differ(measured.got, measured.golden, measured.allowed)


def _differ(x: torch.Tensor, y: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    finite = x.isfinite() & y.isfinite()
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(finite, (x - y).abs() > allowed, ~same)


def _norm(difference: torch.Tensor, where: torch.Tensor) -> float:
    return float(torch.where(where & difference.isfinite(), difference, 0.0).norm())
