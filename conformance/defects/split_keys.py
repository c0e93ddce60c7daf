"""Decode with the keys of a request in splits, each with its own softmax, combined by their maxima."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch

from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.layered import LayeredDecode


def joined(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state of two splits together."""
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    wa, wb = (a.maximum - shift).exp(), (b.maximum - shift).exp()
    return SoftmaxState(maximum, a.total * wa + b.total * wb, a.weighted * wa + b.weighted * wb)


class SplitDecode(LayeredDecode):
    """Splits of ``split`` keys each."""

    key_tile = 32
    split = 256

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        share = self._share(seq_len)
        spans = [slice(start, min(start + share, seq_len)) for start in range(0, seq_len, share)]
        parts = [self._over(self._within(span), q, request, seq_len, kv_cache, k_scale) for span in spans]
        return self._combine(list(map(self._part, parts))) if parts else self._initial(q, q[..., : self.kv_lora_rank])

    def _within(self, span: slice) -> Iterator[slice]:
        for start in range(span.start, span.stop, self.key_tile):
            yield slice(start, min(start + self.key_tile, span.stop))

    def _share(self, seq_len: int) -> int:
        """Keys of a split."""
        return self.split

    def _part(self, state: SoftmaxState) -> SoftmaxState:
        """A split's state as it waits for the others."""
        return state

    def _combine(self, parts: Sequence[SoftmaxState]) -> SoftmaxState:
        return reduce(joined, parts)
