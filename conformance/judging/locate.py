"""Where an error lives: request, query of the request, head and column."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.problems.operands import segments


@dataclass(frozen=True)
class Position:
    """A position in an output [T, N, V] or an LSE [N, T].

    Attributes:
        row: row of the tensor.
        head: query head.
        column: column of the output, or None for a whole row.
        request: request that the row belongs to.
        position: the row's position among the request's new tokens.
    """

    row: int
    head: int
    column: int | None
    request: int
    position: int

    @staticmethod
    def of(rows: JudgedRows, index: list[int]) -> "Position":
        """The place of ``[judged row, head]`` or ``[judged row, head, column]``."""
        judged, head, *rest = index
        token = rows.number(judged)
        request = bisect_right(rows.query_start_loc, token) - 1
        position = token - rows.query_start_loc[request]
        return Position(judged, head, rest[0] if rest else None, request, position)

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return f"request {self.request}, query {self.position}, head {self.head}{column}"

    def to_json(self) -> dict[str, int]:
        """Plain data, without what is not known."""
        found = {"request": self.request, "query": self.position, "head": self.head}
        return found if self.column is None else {**found, "column": self.column}


def extent(rows: JudgedRows, wrong: torch.Tensor) -> str:
    """How far an error reaches: ``wrong`` is a mask [T], [T, N] or [T, N, V] with at least one place."""
    affected = wrong.view(len(wrong), -1).any(dim=1)
    requests = sum(bool(affected[part].any()) for part in segments(rows.start_loc))
    counts = [(requests, len(rows.start_loc) - 1, "requests"), (int(affected.sum()), len(affected), "rows")]
    for dim, name in ((1, "heads"), (2, "columns")):
        if dim < wrong.dim():
            affected = wrong.movedim(dim, 0).flatten(1).any(dim=1)
            counts.append((int(affected.sum()), len(affected), name))
    return "wrong in " + ", ".join(f"{count} of {total} {name}" for count, total, name in counts)


def worst_position(rows: JudgedRows, share: torch.Tensor) -> Position:
    """The place of the largest value of ``share`` [T, N, V] or [T, N]."""
    index = []
    position = int(share.argmax())
    for size in reversed(share.shape):  # torch.unravel_index imports sympy, which takes seconds
        position, at = divmod(position, size)
        index.append(at)
    return Position.of(rows, index[::-1])
