"""Many calls of one case, launched back to back: a race shows as a result whose bits differ."""

import time
from functools import partial
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned, parts_of
from mla_conformance.judging.traits import Repeated
from mla_conformance.judging.verdict import Nonconformance, Status
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import judge
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial

_AT_ONCE = 16
"""Calls whose results are kept until they are compared, so that nothing stands between their launches."""


def repeated(subject: Subject, context: Context, case: Case, calls: int) -> Repeated:
    """What so many further calls of a case show, which has to hold first."""
    subject.executor.begin()
    trial = Trial(subject, case, context)
    try:
        trial.require_support()
        trial.conforms()
        differing, *kept = trial.call("repeated calls", partial(launched, trial.backend, trial.problem, calls))
    except Nonconformance as failure:
        return Repeated(failed=str(failure))
    numbers, seconds = differing[:-1].long().tolist(), float(differing[-1])
    found = Repeated(calls, seconds, deterministic=trial.declaration.deterministic)
    return _told(trial, found, numbers, kept) if numbers else found


def launched(backend: Any, problem: Problem, calls: int) -> tuple[torch.Tensor, ...]:
    """Make a problem's calls so often, and compare.

    Returns:
        Numbers of the calls that differ from the first one, counted from 1, and behind them the seconds of all; then
        the tensors of the first call and those of the first that differs.
    """
    for call in problem.calls:
        call.prepare(backend)
    first, flags, other = [part.clone() for part in _once(backend, problem)], [], list[torch.Tensor]()
    _wait(problem)
    began = time.perf_counter()
    for start in range(1, calls, _AT_ONCE):
        results = [_once(backend, problem) for _ in range(start, min(start + _AT_ONCE, calls))]
        flags += [_differs(first, result) for result in results]
        if not other and bool(torch.stack(flags[-len(results) :]).any()):
            other = next(result for result in results if bool(_differs(first, result)))
    _wait(problem)
    seconds = time.perf_counter() - began
    numbers = torch.stack(flags).nonzero().flatten().cpu() + 2 if flags else torch.zeros(0)
    return torch.cat([numbers.double(), torch.tensor([seconds], dtype=torch.float64)]), *first, *other


def _once(backend: Any, problem: Problem) -> list[torch.Tensor]:
    """The tensors that all calls of a problem return."""
    return [part for call in problem.calls for part in parts_of(call.invoke(backend, call.output_buffer()))]


def _differs(first: list[torch.Tensor], other: list[torch.Tensor]) -> torch.Tensor:
    """Whether any bit differs, where the tensors are."""
    pairs = zip(first, other, strict=True)
    return torch.stack([(_bytes(mine) != _bytes(theirs)).any() for mine, theirs in pairs]).any()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _wait(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)


def _told(trial: Trial, found: Repeated, numbers: list[int], kept: list[torch.Tensor]) -> Repeated:
    """Where the first result that differs does, and whether it is right."""
    first, other = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    places = [(mine != theirs) & ~(mine.isnan() & theirs.isnan()) for mine, theirs in zip(first, other, strict=True)]
    rows = int(places[0].flatten(1).any(dim=1).sum())
    what = f"{sum(int(each.sum()) for each in places)} elements of {sum(map(torch.numel, first))} in {rows} rows"
    verdict = judge(trial.problem, trial.expect(trial.problem), _observed(trial.problem, other), trial.declaration)
    wrong = "" if verdict.status is Status.PASS else verdict.message
    return Repeated(found.calls, found.seconds, len(numbers), numbers[0], what, wrong, "", found.deterministic)


def _observed(problem: Problem, parts: list[torch.Tensor]) -> Observation:
    """The tensors of all calls as the judge takes them; what is merged of them was judged with the first."""
    each = len(parts) // len(problem.calls)
    groups = [parts[start : start + each] for start in range(0, len(parts), each)]
    values = [group[0] if each == 1 else tuple(group) for group in groups]
    return Observation(tuple(map(Returned, problem.calls, values)), None, ())
