"""Golden attention over lists of keys, for a GPU: the values of `selected`, near the machine's speed.

Rows that name equally many keys are a batch of products, in which a row's heads are its queries. The sums, their kernel
and the precision of their error terms are those of `blockwise`.

The floor, for each pair of a head's query and a key that its row names, of D = P + R and V columns:
  float64   2D + 2V operations, 2,176 of latents: 36 ps on an H200 (59.7 TFLOP/s in float64);
  terms     2D + 6V operations in bfloat16, 4,224: 5 ps;
  memory    what is gathered for a row serves all of its heads, 50 bytes a column and more: 40 ps for 128 heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.blocks import in_lanes
from mla_conformance.reference.row_sums import LARGEST_EXPONENT, LEAST_SUM, RowSums, empty_state, norms, store
from mla_conformance.reference.tiles import Queries, Tile, TileKeys, magnitudes

_LOW = torch.bfloat16
_KEYS_OF_A_LANE = 2**17
"""Keys that are gathered at a time for all rows, 1.7 GB of latents: 64 rows of 2,048, whose 128 heads fill a GPU."""


@dataclass(frozen=True)
class RowsOverLists:
    """Rows and the lists of keys that they name.

    Attributes:
        q: [T, N, D], any float dtype, as are k and v.
        k: [S, D].
        v: [S, V].
        selected: [T, K], numbers of keys, anything below 0 for none.
        scale: factor of the logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    selected: Tensor
    scale: float

    def state(self) -> AttentionState | None:
        """The state of all rows, error terms float32; None where operands are not finite, or sums leave the range."""
        state = empty_state(len(self.q), self.q.shape[1], self.v.shape[1], True, self.q.device)
        for part in state.parts():
            part.zero_()
        state.lse.fill_(-torch.inf)  # stays so for rows that name no key
        parts = list(self._alike())
        extremes = torch.ones(len(parts), 2, dtype=torch.float64, device=self.q.device)
        lengths = norms(self.q), norms(self.k)
        in_lanes(self.q.device, [self._fill(state, *work, lengths) for work in zip(parts, extremes, strict=True)])
        if all(least >= LEAST_SUM and math.isfinite(most) for least, most in extremes.tolist()):
            return state
        return None

    def _alike(self) -> Iterator[Tensor]:
        """Numbers of rows that name equally many keys, one or more."""
        counts = (self.selected >= 0).sum(dim=1)
        for count in counts.unique().tolist():
            if count:
                yield from (counts == count).nonzero()[:, 0].split(max(1, _KEYS_OF_A_LANE // count))

    def _fill(
        self, state: AttentionState, rows: Tensor, extremes: Tensor, lengths: tuple[Tensor, Tensor]
    ) -> Iterator[None]:
        """Write some rows into the state, and their sums' extremes; one step."""
        lists = self.selected[rows]
        named = lists[lists >= 0].view(len(rows), -1)
        of_queries, of_keys = lengths[0][rows].double(), lengths[1][named].amax(dim=1).double()
        shift = (abs(self.scale) * of_queries * of_keys[:, None] - LARGEST_EXPONENT).clamp_(min=0.0).unsqueeze(-1)
        sums = self._sums(self.q[rows], self.k[named], self.v[named], shift)
        found = empty_state(self.q.shape[1], len(rows), self.v.shape[1], True, self.q.device)
        store(sums, _LOW, found)
        for whole, part in zip(state.parts(), found.parts(), strict=True):
            whole[rows] = part.transpose(0, 1)
        extremes.copy_(sums.extremes())
        yield

    def _sums(self, q: Tensor, k: Tensor, v: Tensor, shift: Tensor) -> RowSums:
        """Of operands with the rows first, as heads are elsewhere; shift [n, N, 1] float64."""
        factor = torch.full((), self.scale, dtype=torch.float64, device=q.device)
        queries = Queries(_readable(q), factor, magnitudes(_readable(q) * self.scale, _LOW))
        low_v = torch.empty(3 * len(v), *v.shape[1:], dtype=_LOW, device=v.device)
        absolute, same, squares = low_v.chunk(3)
        same.copy_(absolute.copy_(v).abs_())
        torch.square(absolute, out=squares)
        keys = TileKeys(_readable(k), v.double(), magnitudes(k, _LOW), low_v)
        sums = RowSums.zeros(torch.Size((*q.shape[:2], v.shape[2])), shift, True, q.device)
        sums.add(Tile(queries, keys, None))
        sums.set_absolute(absolute.sum(dim=1, keepdim=True, dtype=torch.float32))
        return sums


def _readable(x: Tensor) -> Tensor:
    """Itself in float32, or float64, which the kernel reads; exact."""
    return x if x.dtype == torch.float64 else x.float()
