"""Where numbers are wrong, and what they give away; a finding is told only where nothing else fits."""

import math
from bisect import bisect_right
from dataclasses import dataclass

import torch

from mla_conformance.judging.golden import JudgedRows
from mla_conformance.problems.operands import segments


@dataclass(frozen=True)
class Position:
    row: int  # row of the tensor
    head: int  # query head
    column: int | None  # column of the output, or None for a whole row
    request: int  # request that the row belongs to
    position: int  # the row's position among the request's new tokens

    @staticmethod
    def of(rows: JudgedRows, index: list[int]) -> "Position":
        judged, head, *rest = index
        token = rows.number(judged)
        request = bisect_right(rows.query_start_loc, token) - 1
        return Position(judged, head, rest[0] if rest else None, request, token - rows.query_start_loc[request])

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return f"{self.row_name}, head {self.head}{column}"

    @property
    def row_name(self) -> str:
        return f"request {self.request}, query {self.position}"

    def to_json(self) -> dict[str, int]:
        found = {"request": self.request, "query": self.position, "head": self.head}
        return found if self.column is None else {**found, "column": self.column}


def extent(rows: JudgedRows, wrong: torch.Tensor) -> str:
    """How far an error reaches, and where first: ``wrong`` is a mask [T], [T, N] or [T, N, V] with a place at least."""
    affected = wrong.reshape(len(wrong), -1).any(dim=1)
    requests = sum(bool(affected[part].any()) for part in segments(rows.start_loc))
    reach = [f"{requests} of {len(rows.start_loc) - 1} requests", reach_of(affected, "row")]
    for dim, name in ((1, "head"), (2, "column")):
        if dim < wrong.dim():
            reach.append(reach_of(wrong.movedim(dim, 0).flatten(1).any(dim=1), name))
    row, by_row = int(affected.int().argmax()), wrong.dim() == 1
    head = 0 if by_row else int(wrong[row].reshape(wrong.shape[1], -1).any(dim=1).int().argmax())
    first = Position.of(rows, [row, head])
    return f"wrong in {', '.join(reach)}, first at {first.row_name if by_row else first}"


def reach_of(affected: torch.Tensor, name: str) -> str:
    """How many of a mask [n], and which where several are side by side and others are right."""
    places = affected.nonzero().flatten().tolist()
    count, first, last = len(places), places[0], places[-1]
    text = f"{count} of {len(affected)} {name}s"
    if count == 1 or count == len(affected):
        return text
    if last - first != count - 1:
        return f"{text} ({', '.join(map(str, places))})" if count <= _LISTED else text
    return f"{text} (from {first} on)" if last == len(affected) - 1 else f"{text} ({first} to {last})"


def worst_position(rows: JudgedRows, share: torch.Tensor) -> Position:
    index = []
    position = int(share.argmax())
    for size in reversed(share.shape):  # torch.unravel_index imports sympy, which takes seconds
        position, at = divmod(position, size)
        index.append(at)
    return Position.of(rows, index[::-1])


TRANSPOSED = "the LSE is transposed, expected [heads, tokens]"
UNWRITTEN = "the last heads are 0 in every row, as if they were not written"
_LISTED = 6
_CLOSE = 1e-3
_MANY = 8
_ALIKE = 2**-6  # spread of a common factor: what is rounded to bf16 may be off by 2^-8, either way
_TELLING = 0.05  # least spread of values, by their size, by which a factor is told from an offset
_LSE_FACTORS = {
    1 / math.log(2): "in base 2, expected the natural logarithm",
    math.log(2): "multiplied by ln 2, as if it had been in base 2",
}


def explain_lse(lse: torch.Tensor, golden: torch.Tensor) -> str:
    """A finding for a wrong LSE [N, T] of rows of which some see several keys; empty if none fits."""
    finite = golden.isfinite()
    want, got = golden[finite], lse[finite]
    # The golden values vary enough to tell a factor.
    if want.numel() >= 3 and float(want.max() - want.min()) > _TELLING * float(want.abs().max()):
        for factor, what in _LSE_FACTORS.items():
            if bool(((got - factor * want).abs() <= _CLOSE * want.abs() + _CLOSE).all()):
                return f"the LSE is {what}"
    return TRANSPOSED if lse.shape[0] == lse.shape[1] and _is_rather(lse, golden.mT, golden) else ""


def explain_output(output: torch.Tensor, golden: torch.Tensor) -> str:
    if not bool(output[:, -1].any()) and bool(golden[:, -1].any()):
        return UNWRITTEN if bool(output.any()) else ""
    shifts = [s for s in range(1, golden.shape[1]) if _is_rather(output, golden.roll(s, dims=1), golden)]
    return f"heads are rotated by {shifts[0]}" if len(shifts) == 1 else ""


def common_factor(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor) -> str:
    """By what all wrong numbers of any shape are too large, as a clause; empty if it is not the same for them."""
    counted = wrong & got.isfinite() & want.isfinite()
    counted &= want.abs() > _TELLING * want.where(counted, 0.0).abs().max()
    ratios = (got / want)[counted]
    if ratios.numel() < _MANY:
        return ""
    mean, spread = float(ratios.mean()), float(ratios.max() - ratios.min())
    # None of numbers that are too large here and too small there.
    return f"; got / expected = {mean:.4g} there" if spread <= min(_ALIKE * abs(mean), abs(mean - 1)) else ""


def _is_rather(got: torch.Tensor, other: torch.Tensor, golden: torch.Tensor) -> bool:
    """Whether a result is ``other`` where that is not nearly the golden one; infinities stand where they stand."""
    if not torch.equal(got.isfinite(), other.isfinite()):
        return False
    got, other, golden = (x.nan_to_num(0.0, 0.0, 0.0) for x in (got, other, golden))
    size = float(golden.norm())
    return float((got - other).norm()) <= 0.01 * size and float((other - golden).norm()) > 0.1 * size
