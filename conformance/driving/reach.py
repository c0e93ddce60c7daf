"""How far a case's operands reach, and the memory that takes."""

import re
from dataclasses import dataclass

from mla_conformance.cases.case import FAR, Case

_MARGIN_BYTES = 2 << 30
_ITEM_BYTES = 2


@dataclass(frozen=True)
class Reach:
    """What is far away, and how far.

    Attributes:
        operand: ``q``, ``k``, ``v``, ``rows`` or ``cache``.
        elements: that many lie before what is judged.
    """

    operand: str
    elements: int

    @staticmethod
    def of(case: Case) -> "Reach":
        """The case's field ``far``."""
        found = re.fullmatch(r"(\w+?)(\d\d)", case.far)
        assert found and case.far in FAR
        return Reach(found[1], 2 ** int(found[2]))


def needed_bytes(case: Case) -> int:
    """Device memory that the operands and the output of a far case take, with a margin for the kernel's own."""
    reach, dims = Reach.of(case), case.dimensions
    if reach.operand != "rows":
        return 2 * _ITEM_BYTES * reach.elements + _MARGIN_BYTES
    rows = rows_before(case)
    columns = dims.qk_head_dim + 2 * dims.v_head_dim
    return _ITEM_BYTES * rows * case.heads * columns + _MARGIN_BYTES


def rows_before(case: Case) -> int:
    """Rows whose output, narrower than the queries, reaches as far as the case says."""
    return -(-Reach.of(case).elements // (case.heads * case.dimensions.v_head_dim))
