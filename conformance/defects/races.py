"""Kernels that are wrong, or only other in their bits, once in many calls, as races are; too rare for twenty repeats.

They stand beside the known defects, which one run of the suite has to find.
"""

from random import Random

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import SplitDecode
from mla_conformance.defects.known import but, kernels


class _Rare:
    """Loses its race once in ``one_in`` calls on average, at calls drawn by a seed."""

    one_in: int

    def _loses(self) -> bool:
        draw = self.__dict__.setdefault("_draw", Random(self.one_in))
        return draw.randrange(self.one_in) == 0


@kernels()
class _Prefill(_Rare, EagerPrefillBackend):
    @but(one_in=100, key_tile=16)
    class order_of_additions:
        """Once in 100 calls the key tiles are added up in another order, as by atomic additions; right, with other
        bits."""

        def _batch(self, *operands, **options):
            self._lost = self._loses()
            return super()._batch(*operands, **options)

        def _tiles(self, keys):
            tiles = list(super()._tiles(keys))
            return tiles[::-1] if self._lost else tiles

    @but(one_in=1000)
    def stale_row__behind_batch(self, output, lse):
        """Once in 1,000 calls the first row is stored before it was computed."""
        if self._loses():
            output[0] = 0.0


@kernels()
class _Splits(_Rare, SplitDecode):
    @but(one_in=100, split=32)
    class order_of_splits:
        """Once in 100 calls the splits of a decode are joined the other way round."""

        def run_decode(self, *operands):
            self._lost = self._loses()
            return super().run_decode(*operands)

        def _combine(self, parts):
            return super()._combine(parts[::-1] if self._lost else parts)


@kernels()
class _Decode(_Rare, EagerDecodeBackend):
    @but(one_in=300)
    def unfinished_tile__behind_run_decode(self, output, lse):
        """Once in 300 calls the last row is stored before its last tile was added."""
        if self._loses():
            output[-1] = output[-1] * 0.5

    @but(one_in=5000)
    def rarest_row__behind_run_decode(self, output, lse):
        """Once in 5,000 calls the row of the last request is that of the first."""
        if self._loses():
            output[-1] = output[0]


@kernels()
class _Sparse(_Rare, EagerSparseBackend):
    @but(one_in=1000)
    def last_bit__behind_attend(self, output, lse):
        """Once in 1,000 calls one element is rounded the other way; the result is right."""
        if self._loses():
            output.view(torch.int16)[0, 0, 0] ^= 1
