"""Operands of golden attention, widened, and the pieces of them that are multiplied with each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.reference.blocks import cuts
from mla_conformance.reference.visible import Request

View = Callable[[Tensor], Tensor]
"""Picks rows of a [h, rows, columns] tensor, without a copy."""


def cut(rows: slice) -> View:
    """The rows ``rows`` of every head."""
    return lambda x: x[:, rows]


def folded(size: int, rows: slice = slice(None)) -> View:
    """The rows ``rows`` of every ``size`` consecutive rows, each such piece in the place of a head."""
    return lambda x: x.view(-1, size, x.shape[-1])[:, rows]


@dataclass(frozen=True)
class Queries:
    """Queries of some heads, times the scale: wide [h, r, D] float64; low, magnitudes in low precision, or None."""

    wide: Tensor
    low: Tensor | None

    @staticmethod
    def widened(request: Request, heads: slice, rows: slice, scale: float, low: torch.dtype | None) -> "Queries":
        """Rows of a request; the precision ``low`` is what error terms need."""
        wide = _wide(request.q[rows, heads]).mul_(scale)
        return Queries(wide, None if low is None else magnitudes(wide, low))

    def padded(self, rows: int) -> "Queries":
        """With zeros after them, ``rows`` rows in all."""
        return self.map(lambda x: padded(x, rows))

    def map(self, view: View) -> "Queries":
        """The view of each part."""
        return Queries(view(self.wide), None if self.low is None else view(self.low))


@dataclass(frozen=True)
class LowKeys:
    """What error terms take of keys and values, in low precision: |k| [h, c, D], |v| and v² [h, c, V]."""

    k: Tensor
    v: Tensor
    squared: Tensor

    def bounds(self, queries: Tensor | None) -> Tensor:
        """[h, r, c] bounds of the scores of queries whose magnitudes are given."""
        assert queries is not None
        return torch.bmm(queries, self.k.mT)

    def map(self, view: View) -> "LowKeys":
        """The view of each part."""
        return LowKeys(view(self.k), view(self.v), view(self.squared))


@dataclass(frozen=True)
class Keys:
    """Keys and values of some heads: k [h, c, D] and v [h, c, V] float64; low is None without error terms."""

    k: Tensor
    v: Tensor
    low: LowKeys | None

    @staticmethod
    def widened(request: Request, heads: slice, keys: slice, low: torch.dtype | None) -> "Keys":
        """Some keys of a request; the precision ``low`` is what error terms need."""
        k, v = request.k[keys, heads], request.v[keys, heads]
        if low is None:
            return Keys(_wide(k), _wide(v), None)
        absolute = magnitudes(v.transpose(0, 1), low)
        return Keys(_wide(k), _wide(v), LowKeys(magnitudes(k.transpose(0, 1), low), absolute, absolute.square()))

    @staticmethod
    def bytes_of_key(width: int, value_width: int, low: torch.dtype | None) -> int:
        """Bytes of one key of one head, of widths D and V."""
        wide = 8 * (width + value_width)
        return wide if low is None else wide + low.itemsize * (width + 2 * value_width)

    def parts(self, width: int) -> list["Keys"]:
        """Consecutive pieces of ``width`` keys; the last may be shorter."""
        return [self.map(cut(part)) for part in cuts(self.k.shape[1], width)]

    def padded(self, keys: int) -> "Keys":
        """With zeros after them, ``keys`` keys in all."""
        return self.map(lambda x: padded(x, keys))

    def map(self, view: View) -> "Keys":
        """The view of each part."""
        return Keys(view(self.k), view(self.v), self.low and self.low.map(view))


@dataclass(frozen=True)
class Band:
    """Rows and the keys that they see.

    Attributes:
        rows: picks the rows of queries and of sums.
        keys: the keys, in parts that are multiplied at a time.
        hidden: [r, c] bool, which keys a row does not see, where it does not see all; then there is one part.
    """

    rows: View
    keys: Sequence[Keys]
    hidden: Tensor | None = None

    def scores(self, queries: Queries) -> Iterator[tuple[Keys, Tensor]]:
        """A part and its scores [h, r, c] float64, -inf where a row does not see a key; queries of these rows."""
        for keys in self.keys:
            scores = torch.bmm(queries.wide, keys.k.mT)
            yield keys, scores if self.hidden is None else scores.masked_fill_(self.hidden, -torch.inf)


def magnitudes(x: Tensor, low: torch.dtype) -> Tensor:
    """|x| in low precision, of any float dtype, contiguous."""
    return torch.empty(x.shape, dtype=low, device=x.device).copy_(x).abs_()


def _wide(x: Tensor) -> Tensor:
    """[rows, h, columns] of any float dtype as [h, rows, columns] float64, a copy."""
    x = x.transpose(0, 1)
    return torch.empty(x.shape, dtype=torch.float64, device=x.device).copy_(x)


def padded(x: Tensor, rows: int) -> Tensor:
    """[h, r, columns] with zeros up to ``rows`` rows."""
    return x if x.shape[1] == rows else pad(x, (0, 0, 0, rows - x.shape[1]))
