"""Many calls of one case, back to back, under load and between others: a race shows as a result whose bits differ."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned, parts_of
from mla_conformance.judging import record, traits
from mla_conformance.problems.calls import Problem
from mla_conformance.roles.definition import judge
from mla_conformance.traits.examine import begun
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context

_SURROUNDINGS = ("in calls back to back", "beside other streams or threads", "between calls of another batch")
"""What else goes on while calls are made, so many calls by turns; the words stand behind what differs."""
_AT_ONCE = 16  # calls whose results are kept until they are compared, so that nothing stands between their launches
_BESIDE = 2  # streams of a GPU, or threads beside a CPU's
_SIZES = {"cuda": (256, 512, 1024, 2048), "cpu": (64, 128, 256)}
"""Rows of the factors, by turns of chance: each product leaves the kernel other multiprocessors, for another time."""


def repeated(subject: Subject, context: Context, case: Case, calls: int) -> traits.Repeated:
    try:
        trial = begun(subject, context, case)
        if any(part is None for returned in trial.conforms().returned for part in parts_of(returned.value)):
            return traits.Repeated(failed="its calls write into memory and return nothing to compare")
        varied = trial.case.varied()
        other = None if trial.unsupported(varied) else trial.build(varied)
        differing, *kept = trial.call("repeated calls", partial(launched, trial.backend, trial.problem, calls, other))
    except record.Nonconformance as failure:
        return traits.Repeated(failed=str(failure))
    numbers, seconds = differing[:-1].long().tolist(), float(differing[-1])
    if not numbers:
        return traits.Repeated(calls, seconds, deterministic=trial.declaration.deterministic)
    first, other = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    places = [(mine != theirs) & ~(mine.isnan() & theirs.isnan()) for mine, theirs in zip(first, other, strict=True)]
    rows = int(places[0].flatten(1).any(dim=1).sum())
    what = f"{sum(int(each.sum()) for each in places)} elements of {sum(map(torch.numel, first))} in {rows} rows"
    what += f", {_SURROUNDINGS[_surroundings(numbers[0] - 1)]}"
    # The tensors of all calls as the judge takes them; what is merged of them was judged with the first.
    each, problem = len(other) // len(trial.problem.calls), trial.problem
    groups = [other[start : start + each] for start in range(0, len(other), each)]
    values = [group[0] if each == 1 else tuple(group) for group in groups]
    returned = [Returned(value, call=call) for call, value in zip(problem.calls, values, strict=True)]
    verdict = judge(problem, context.expect(problem), Observation(tuple(returned), None, ()), trial.declaration)
    wrong = "" if verdict.status is record.Status.PASS else verdict.message
    return traits.Repeated(calls, seconds, len(numbers), numbers[0], what, wrong, "", trial.declaration.deterministic)


def launched(backend: Any, problem: Problem, calls: int, other: Problem | None) -> tuple[torch.Tensor, ...]:
    """Numbers of the calls that differ from the first, the seconds of all; tensors of the first and the first other."""

    def another() -> None:  # as of an engine's step
        if other is not None:
            _once(backend, other, prepares=True)

    first = [part.clone() for part in _once(backend, problem, prepares=True)]
    flags, differing = list[torch.Tensor](), list[torch.Tensor]()
    on_gpu = problem.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(problem.device)
    began = time.perf_counter()
    with _streams(problem.device) if on_gpu else _threads() as more:
        for start in range(1, calls, _AT_ONCE):
            before, block = (lambda: None, more, another)[_surroundings(start)], list[list[torch.Tensor]]()
            for _ in range(start, min(start + _AT_ONCE, calls)):
                before()
                block.append(_once(backend, problem, prepares=before is another and other is not None))
            for result in block:
                pairs = (
                    [x.contiguous().view(-1).view(torch.uint8) for x in pair]
                    for pair in zip(first, result, strict=True)
                )
                flags.append(torch.stack([(mine != theirs).any() for mine, theirs in pairs]).any())
            if not differing and bool((found := torch.stack(flags[-len(block) :])).any()):
                differing = block[int(found.nonzero()[0])]
    if on_gpu:
        torch.cuda.synchronize(problem.device)
    seconds = time.perf_counter() - began
    numbers = torch.stack(flags).nonzero().flatten().cpu() + 2 if flags else torch.zeros(0)
    return torch.cat([numbers.double(), torch.tensor([seconds], dtype=torch.float64)]), *first, *differing


def _once(backend: Any, problem: Problem, prepares: bool) -> list[torch.Tensor]:
    ranks, parts = isinstance(problem.case, CachedCase) and len(problem.calls) > 1, list[torch.Tensor]()
    for call in problem.calls if prepares else ():
        call.prepare(backend)
    for call in problem.calls:
        if ranks:  # which share the instance
            call.prepare(backend)
        parts += parts_of(call.invoke(backend, call.output_buffer()))
    return parts


def _surroundings(number: int) -> int:
    return (number - 1) // _AT_ONCE % len(_SURROUNDINGS)


@contextmanager
def _streams(device: torch.device) -> Iterator[Callable[[], None]]:
    draw, sizes = Random(0), _SIZES["cuda"]
    factor = torch.full((max(sizes), max(sizes)), 0.5, dtype=torch.bfloat16, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(_BESIDE)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))

    def more() -> None:
        for stream in streams:
            size = draw.choice(sizes)
            with torch.cuda.stream(stream):
                torch.mm(factor[:size, :size], factor[:size, :size])

    try:
        yield more
    finally:
        torch.cuda.synchronize(device)


@contextmanager
def _threads() -> Iterator[Callable[[], None]]:
    draw, sizes = Random(0), _SIZES["cpu"]
    factor, pending = torch.full((max(sizes), max(sizes)), 0.5), list[Future[torch.Tensor]]()
    with ThreadPoolExecutor(_BESIDE) as pool:

        def more() -> None:
            pending[:] = [product for product in pending if not product.done()]
            while len(pending) < _BESIDE:
                size = draw.choice(sizes)
                pending.append(pool.submit(torch.mm, factor[:size, :size], factor[:size, :size]))

        yield more
