"""Which rows of a batch, queries with all heads, are judged, and what judging a case takes.

Rows are chosen by the problem alone, so that every backend and every machine with the same limit judges the same.
"""

import hashlib
import random
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import NamedTuple

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import FAR, Call, Case
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.operands import segments

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
    def start_loc(self) -> tuple[int, ...]:
        if self.numbers is None:
            return self.query_start_loc
        return tuple(bisect_left(self.numbers, start) for start in self.query_start_loc)

    def number(self, judged: int) -> int:
        return judged if self.numbers is None else self.numbers[judged]

    def pick(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The judged rows of a tensor whose dimension ``dim`` is the batch's rows, padding rows after them."""
        if self.numbers is None:
            return rows.narrow(dim, 0, self.query_start_loc[-1])
        return rows.index_select(dim, torch.tensor(self.numbers, dtype=torch.long, device=rows.device))


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


_MARGIN_BYTES = 2 << 30
_FAR_ITEM_BYTES = 2
_FAR_KERNELS = (Role.PREFILL, Role.DECODE, Role.SPARSE)
_FAR_BYTES = 8  # of others: they have float32, or two caches


class Reach(NamedTuple):
    operand: str  # ``q``, ``k``, ``v``, ``rows`` or ``cache``
    elements: int  # that many lie before what is judged

    @staticmethod
    def of(case: Case) -> "Reach":
        found = re.fullmatch(r"(\w+?)(\d\d)", case.far)
        assert found and case.far in FAR
        return Reach(found[1], 2 ** int(found[2]))


def needed_bytes(case: Case) -> int:
    reach = Reach.of(case)
    if reach.operand != "rows":
        each = _FAR_ITEM_BYTES if case.role in _FAR_KERNELS else _FAR_BYTES
        return 2 * each * reach.elements + _MARGIN_BYTES
    return _FAR_ITEM_BYTES * rows_before(case) * (case.sizes.row + case.sizes.output) + _MARGIN_BYTES


def rows_before(case: Case) -> int:
    """Rows whose output, narrower than the queries, reaches as far as the case says."""
    return -(-Reach.of(case).elements // case.sizes.output)


MOST_OPERATIONS = {"cpu": 1e12}
"""Useful operations of the largest case that is judged on a type of device; beyond, a CPU takes hours."""

_WORKSPACE = 2**28
_INPUT_COPIES, _RESULT_COPIES = 6, 16
_RANK_COPIES = 10  # copies of the results that are kept of each rank, where there are several
_ITEM_BYTES = {"fp32": 4, "fp64": 8}


def memory_need(case: Case, device_type: str) -> int:
    """Bytes that judging a case takes at most, generously: inputs and their copies, results in float64, workspaces."""
    dims = case.dimensions
    rows, keys = sum(case.q) + case.pad, sum(case.q) + sum(case.kv)
    elements = rows * case.sizes.row + keys * case.sizes.key
    inputs = _INPUT_COPIES * _ITEM_BYTES.get(case.dtype, 2) * elements
    projected = 3 * 8 * min(case.workspace, keys) * case.heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    judged = min(rows, TELLING_ROWS + DRAWN_ROWS) if case.operations() > FULL_OPERATIONS[device_type] else rows
    ranks = case.ranks if isinstance(case, CachedCase) and case.is_merged else 0
    copies = _RESULT_COPIES + _RANK_COPIES * ranks
    results = copies * 8 * judged * case.sizes.output
    far = 0 if case.far == "none" else needed_bytes(case)
    return far + _WORKSPACE + inputs + results + (projected if case.call == Call.CHUNKED_CONTEXT else 0)
