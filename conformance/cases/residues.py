"""What the numbers of a batch leave of tiles, warps and groups of heads, for every role alike. No torch.

No row asks for a residue; among the members that are drawn for a row those with new pairs of residues are taken.
"""

from collections.abc import Callable, Sequence
from functools import partial

from mla_conformance.cases.case import Case
from mla_conformance.cases.space import Dimension, measured

_OF_A_GROUP = ("0", "1", "-1", "few", "more")


def _of_group(number: int, size: int) -> str:
    """What a number leaves of groups of a size: nothing, one, all but one, or up to half of one and more."""
    rest = number % size
    near = {0: "0", 1: "1", size - 1: "-1"}
    return near.get(rest) or ("few" if rest <= size // 2 else "more")


def _modulo(name: str, size: int, of: Callable[[Case], int]) -> Dimension:
    return measured(name, tuple(map(str, range(size))), lambda case: str(of(case) % size))


def _grouped(name: str, size: int, of: Callable[[Case], int]) -> Dimension:
    return measured(name, _OF_A_GROUP, lambda case: _of_group(of(case), size))


def _tiles(size: int, case: Case) -> int:
    """Tiles that the longest request fills or begins."""
    lengths: Sequence[int] = case.kv or (0,) * len(case.q)
    return -(-max(new + before for new, before in zip(case.q, lengths, strict=True)) // size)


RESIDUES: tuple[Dimension, ...] = (
    *(_modulo(f"tiles of {size} mod 4", 4, partial(_tiles, size)) for size in (64, 128, 512)),
    _grouped("requests mod 32", 32, lambda case: len(case.q)),
    _grouped("rows mod 64", 64, lambda case: sum(case.q)),
    _modulo("heads mod 4", 4, lambda case: case.heads),
    _grouped("heads mod 16", 16, lambda case: case.heads),
)


def residues_of(case: Case) -> dict[str, str]:
    """The residues of a case."""
    return {each.name: each.class_of(case) or "" for each in RESIDUES}
