"""Which rows of a batch are judged: every one, or where that is too much work, telling ones and drawn ones.

A row is one query with all its heads. Rows are chosen by the problem alone, so every backend and every machine with
the same limit judges the same.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar

import torch

from mla_conformance.cases.work import useful_operations
from mla_conformance.problems.operands import segments
from mla_conformance.problems.problem import Problem

FULL_OPERATIONS = {"cpu": 2e11, "cuda": 2e13}
"""Useful operations up to which every row is judged, by type of device: seconds of a CPU, one second of an H200."""
TELLING_ROWS = 128
"""Rows at ends and edges that are judged at most, before others are drawn."""
DRAWN_ROWS = 384

_T = TypeVar("_T")


@dataclass(frozen=True)
class JudgedRows:
    """Rows of a batch.

    Attributes:
        query_start_loc: first row of each request of the batch, and the end.
        numbers: the judged rows, ascending; None for all.
        drawn: how many of them were drawn at random from those that are not telling.
    """

    query_start_loc: tuple[int, ...]
    numbers: tuple[int, ...] | None = None
    drawn: int = 0

    @property
    def total(self) -> int:
        """Rows of the batch."""
        return self.query_start_loc[-1]

    @property
    def start_loc(self) -> tuple[int, ...]:
        """First judged row of each request among the judged rows, and the end."""
        if self.numbers is None:
            return self.query_start_loc
        return tuple(bisect_left(self.numbers, start) for start in self.query_start_loc)

    def number(self, judged: int) -> int:
        """The row of the batch that a judged row is."""
        return judged if self.numbers is None else self.numbers[judged]

    def pick(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The judged rows of a tensor whose dimension ``dim`` is the batch's rows, padding rows after them."""
        if self.numbers is None:
            return rows.narrow(dim, 0, self.total)
        return rows.index_select(dim, torch.tensor(self.numbers, dtype=torch.long, device=rows.device))

    def to_json(self) -> dict[str, Any]:
        """What a record says of a choice; nothing where every row is judged."""
        if self.numbers is None:
            return {}
        return {"rows": len(self.numbers), "of": self.total, "drawn": self.drawn}


def choose_rows(problem: Problem) -> JudgedRows:
    """The rows of a problem that are judged."""
    starts = problem.query_start_loc
    whole = useful_operations(problem.case, *_lengths(problem)) <= FULL_OPERATIONS[problem.device.type]
    if whole or starts[-1] <= TELLING_ROWS + DRAWN_ROWS:
        return JudgedRows(starts)
    telling = set(islice(dict.fromkeys(_telling(problem)), TELLING_ROWS))
    rest = [row for row in range(starts[-1]) if row not in telling]
    seed = hashlib.sha256(problem.key.encode()).digest()
    drawn = random.Random(seed).sample(rest, DRAWN_ROWS)
    return JudgedRows(starts, tuple(sorted([*telling, *drawn])), DRAWN_ROWS)


def _lengths(problem: Problem) -> tuple[list[int], list[int]]:
    """New tokens of each request, and what it attends to beside them."""
    new = [rows.stop - rows.start for rows in segments(problem.query_start_loc)]
    seen = list(map(sum, zip(*(call.key_lens for call in problem.calls), strict=True)))
    beside = new if problem.case.is_causal else [0] * len(new)
    return new, [max(0, keys - tokens) for keys, tokens in zip(seen, beside, strict=True)]


def _telling(problem: Problem) -> Iterator[int]:
    """Ends of requests first, then rows on both sides of tiles, pages and chunks, request by request in turn."""
    rows = list(segments(problem.query_start_loc))
    ends = (row for request in rows if request.stop > request.start for row in (request.start, request.stop - 1))
    edges = [[request.start + edge for edge in _edges(request.stop - request.start, problem)] for request in rows]
    return chain(ends, _in_turn(edges))


def _edges(length: int, problem: Problem) -> list[int]:
    """Positions within a request of ``length`` rows, small ones first."""
    sizes = {2**power for power in range(1, 31)} | {problem.case.page, problem.case.workspace}
    return [edge for size in sorted(sizes) for edge in (size - 1, size) if edge < length]


def _in_turn(lists: Sequence[Sequence[_T]]) -> Iterator[_T]:
    return (item for layer in zip_longest(*lists) for item in layer if item is not None)
