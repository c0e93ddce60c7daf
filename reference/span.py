"""Keys widened for golden attention a span at a time, and the scores of blocks of rows against them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.blocks import cuts
from mla_conformance.reference.row_sums import Values
from mla_conformance.reference.visible import Request


@dataclass(frozen=True)
class Span:
    """Consecutive keys of a request, for some heads.

    Attributes:
        heads: which heads.
        start: number of the first key in its request.
        k: [h, s, D] float64.
        v: [h, s, V] float64.
        low: |k| [h, s, D], |v| and v² [h, s, V] in low precision; None without error terms.
    """

    heads: slice
    start: int
    k: Tensor
    v: Tensor
    low: tuple[Tensor, Tensor, Tensor] | None

    @staticmethod
    def widened(request: Request, heads: slice, keys: slice, low: torch.dtype | None) -> "Span":
        """The keys ``keys`` of a request, with what error terms in the precision ``low`` need."""
        narrow = [x[keys, heads].transpose(0, 1) for x in (request.k, request.v)]
        k, v = (x.to(torch.float64).contiguous() for x in narrow)
        if low is None:
            return Span(heads, keys.start, k, v, None)
        magnitudes, absolute = (x.to(low).abs().contiguous() for x in narrow)
        return Span(heads, keys.start, k, v, (magnitudes, absolute, absolute.square()))

    @staticmethod
    def bytes_of_key(width: int, value_width: int, low: torch.dtype | None) -> int:
        """Bytes of one key of one head, of widths D and V."""
        wide = 8 * (width + value_width)
        return wide if low is None else wide + low.itemsize * (width + 2 * value_width)

    def values(self, keys: slice) -> Values:
        """The values of some of these keys."""
        if self.low is None:
            return Values(self.v[:, keys], None, None)
        return Values(self.v[:, keys], self.low[1][:, keys], self.low[2][:, keys])


@dataclass(frozen=True)
class Block:
    """Rows of a request against a span.

    Attributes:
        request: whose rows.
        span: the keys.
        chosen: which rows of the request.
        width: keys that are scored at a time.
        scale: factor of the logits.
    """

    request: Request
    span: Span
    chosen: slice
    width: int
    scale: float

    @property
    def heads(self) -> slice:
        """The heads of the span."""
        return self.span.heads

    @property
    def rows(self) -> slice:
        """Where the rows stand among those of all requests."""
        start = self.request.rows.start
        return slice(start + self.chosen.start, start + self.chosen.stop)

    def scores(self) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
        """(keys of the span, score magnitudes [h, r, c] in low precision or None, scores [h, r, c] float64)."""
        q = self.request.q[self.chosen, self.heads].transpose(0, 1).to(torch.float64) * self.scale
        magnitudes = None if self.span.low is None else self.span.low[0]
        low = None if magnitudes is None else q.abs().to(magnitudes.dtype)
        for keys in cuts(self._visible(self.chosen.stop - 1), self.width):
            scores = self._hidden(torch.bmm(q, self.span.k[:, keys].mT), keys)
            bounds = None if low is None or magnitudes is None else torch.bmm(low, magnitudes[:, keys].mT)
            yield keys, bounds, scores

    def absolute_sums(self) -> Tensor:
        """[h, r, V] float32, or [h, 1, V] for all rows: Σ |v| over the visible keys of the span."""
        assert self.span.low is not None
        first, last = self._visible(self.chosen.start), self._visible(self.chosen.stop - 1)
        absolute = self.span.low[1]
        seen_by_all = absolute[:, :first].sum(dim=1, keepdim=True, dtype=torch.float32)
        if first == last:
            return seen_by_all
        visible = ~self._hides(slice(first, last))
        return seen_by_all + visible.to(absolute.dtype) @ absolute[:, first:last]

    def _visible(self, row: int) -> int:
        """How many keys of the span a row sees."""
        return min(max(self.request.visible(row) - self.span.start, 0), self.span.k.shape[1])

    def _hidden(self, scores: Tensor, keys: slice) -> Tensor:
        """Scores with -inf where a row does not see the key; most blocks are seen whole."""
        first = max(self._visible(self.chosen.start), keys.start)
        if first < keys.stop:
            scores[..., first - keys.start :].masked_fill_(self._hides(slice(first, keys.stop)), -torch.inf)
        return scores

    def _hides(self, keys: slice) -> Tensor:
        """[r, c] bool: which of these keys of the span a row does not see."""
        start = self.span.start
        key = torch.arange(start + keys.start, start + keys.stop, device=self.span.k.device)
        return key >= self.request.counts[self.chosen, None]
