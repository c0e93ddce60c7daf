"""Simpler cases: what to try in the place of a failing one, the boldest step first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mla_conformance.cases.case import Case, CaseError

_STRUCTURE = {"capability", "call", "q", "kv", "heads", "dims"}
_SMALL = "small"


def simpler(case: Case) -> Iterator[Case]:
    """Valid cases that are one step simpler, with fewer requests, tokens or heads, or with fewer unusual fields."""
    for changes in _steps(case):
        try:
            candidate = replace(case, **changes)
        except CaseError:
            continue
        if candidate != case:
            yield candidate


def _steps(case: Case) -> Iterator[dict[str, Any]]:
    size = len(case.q) // 2
    while size:  # without half of the requests, a quarter, and so on down to one
        yield from (case.without(range(start, start + size)) for start in range(0, len(case.q), size))
        size //= 2
    yield from ({"data": regime} for regime in case.regimes if regime != case.data)
    if case.dims != _SMALL:
        yield {"dims": _SMALL}
    yield from ({"heads": heads} for heads in _smaller(case.heads, 1))
    yield from ({name: default} for name, default in case.defaults().items() if name not in _STRUCTURE)
    yield from _shorter(case, "q", 1)
    yield from _shorter(case, "kv", 0)


def _shorter(case: Case, name: str, least: int) -> Iterator[dict[str, Any]]:
    lengths: tuple[int, ...] = getattr(case, name)
    for index, length in enumerate(lengths):
        for shorter in _smaller(length, least):
            yield {name: (*lengths[:index], shorter, *lengths[index + 1 :])}


def _smaller(value: int, least: int) -> Iterator[int]:
    """The least value, then half of the way back, a quarter, and so on to one less."""
    distance = value - least
    while distance > 0:
        yield value - distance
        distance //= 2
