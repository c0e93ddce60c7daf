"""Which rows of a batch are judged: every one, or where that is too much work, telling ones and drawn ones.

A row is one query with all its heads. Rows are chosen by the problem alone, so every backend and every machine with
the same limit judges the same.
"""

import hashlib
import random
from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch

from mla_conformance.cases.case import Call
from mla_conformance.problems.operands import segments
from mla_conformance.problems.problem import Problem

FULL_OPERATIONS = {"cpu": 2e11, "cuda": 2e13}
"""Useful operations up to which every row is judged, by type of device: seconds of a CPU, one second of an H200."""
TELLING_ROWS = 128  # rows at ends and edges that are judged at most, before others are drawn
DRAWN_ROWS = 384


@dataclass(frozen=True)
class JudgedRows:
    query_start_loc: tuple[int, ...]  # first row of each request of the batch, and the end
    numbers: tuple[int, ...] | None = None  # the judged rows, ascending; None for all
    drawn: int = 0  # how many of them were drawn at random from those that are not telling

    @property
    def total(self) -> int:
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
        if self.numbers is None:
            return {}
        return {"rows": len(self.numbers), "of": self.total, "drawn": self.drawn}


def choose_rows(problem: Problem) -> JudgedRows:
    starts, rows = problem.query_start_loc, list(segments(problem.query_start_loc))
    lengths = [each.stop - each.start for each in rows]
    seen = map(sum, zip(*(call.key_lens for call in problem.calls), strict=True))
    # What a request attends to beside its new tokens.
    causal = problem.case.causal and problem.case.call != Call.CONTEXT_CHUNK
    beside = [max(0, keys - new * causal) for keys, new in zip(seen, lengths, strict=True)]
    whole = problem.case.operations(lengths, beside) <= FULL_OPERATIONS[problem.device.type]
    if whole or starts[-1] <= TELLING_ROWS + DRAWN_ROWS:
        return JudgedRows(starts)
    # Ends of requests first, then rows on both sides of tiles, pages and chunks, small ones first, request by request.
    ends = (row for each in rows if each.stop > each.start for row in (each.start, each.stop - 1))
    sizes = sorted({2**power for power in range(1, 31)} | {problem.case.page, problem.case.workspace})
    edges = [
        [each.start + at for size in sizes for at in (size - 1, size) if at < each.stop - each.start] for each in rows
    ]
    in_turn = (row for layer in zip_longest(*edges) for row in layer if row is not None)
    telling = set(islice(dict.fromkeys(chain(ends, in_turn)), TELLING_ROWS))
    rest = [row for row in range(starts[-1]) if row not in telling]
    seed = hashlib.sha256(problem.key.encode()).digest()
    drawn = random.Random(seed).sample(rest, DRAWN_ROWS)
    return JudgedRows(starts, tuple(sorted([*telling, *drawn])), DRAWN_ROWS)
