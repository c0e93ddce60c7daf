"""What judging a case takes, so that one that does not fit is unavailable with the need stated."""

import re
from dataclasses import dataclass
from math import inf

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import FAR, Call, Case
from mla_conformance.judging.judged_rows import DRAWN_ROWS, FULL_OPERATIONS, TELLING_ROWS

_MARGIN_BYTES = 2 << 30
_FAR_ITEM_BYTES = 2
_FAR_KERNELS = (Role.PREFILL, Role.DECODE, Role.SPARSE)
_FAR_BYTES = 8
"""Of others: they have float32, or two caches."""


@dataclass(frozen=True)
class Reach:
    """What is far away, and how far."""

    operand: str  # ``q``, ``k``, ``v``, ``rows`` or ``cache``
    elements: int  # that many lie before what is judged

    @staticmethod
    def of(case: Case) -> "Reach":
        """The case's field ``far``."""
        found = re.fullmatch(r"(\w+?)(\d\d)", case.far)
        assert found and case.far in FAR
        return Reach(found[1], 2 ** int(found[2]))


def needed_bytes(case: Case) -> int:
    """Device memory that the operands and the output of a far case take, with a margin for the kernel's own."""
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


def is_too_long(case: Case, device_type: str) -> bool:
    return case.operations() > MOST_OPERATIONS.get(device_type, inf)
