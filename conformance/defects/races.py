"""Kernels that are wrong, or only other in their bits, once in many calls, as races are; too rare for twenty repeats.

They stand beside the known defects, which one run of the suite has to find.
"""

from random import Random

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import SplitDecode


class _Rare:
    """Loses its race once in ``one_in`` calls on average, at calls drawn by a seed."""

    one_in: int

    def _loses(self) -> bool:
        draw = self.__dict__.setdefault("_draw", Random(self.one_in))
        return draw.randrange(self.one_in) == 0


class OrderOfAdditions(_Rare, EagerPrefillBackend):
    """Once in 100 calls the key tiles are added up in another order, as by atomic additions; right, with other bits."""

    one_in = 100
    key_tile = 16

    def _batch(self, *operands, **options):
        self._lost = self._loses()
        return super()._batch(*operands, **options)

    def _tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return tiles[::-1] if self._lost else tiles


class OrderOfSplits(_Rare, SplitDecode):
    """Once in 100 calls the splits of a decode are joined the other way round."""

    one_in = 100
    split = 32

    def run_decode(self, *operands):
        self._lost = self._loses()
        return super().run_decode(*operands)

    def _combine(self, parts):
        return super()._combine(parts[::-1] if self._lost else parts)


class UnfinishedTile(_Rare, EagerDecodeBackend):
    """Once in 300 calls the last row is stored before its last tile was added."""

    one_in = 300

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        if self._loses():
            output[-1] = output[-1] * 0.5
        return output, lse


class StaleRow(_Rare, EagerPrefillBackend):
    """Once in 1,000 calls the first row is stored before it was computed."""

    one_in = 1000

    def _batch(self, *operands, **options):
        output, lse = super()._batch(*operands, **options)
        if self._loses():
            output[0] = 0.0
        return output, lse


class LastBit(_Rare, EagerSparseBackend):
    """Once in 1,000 calls one element is rounded the other way; the result is right."""

    one_in = 1000

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        if self._loses():
            output.view(torch.int16)[0, 0, 0] ^= 1
        return output, lse


class RarestRow(_Rare, EagerDecodeBackend):
    """Once in 5,000 calls the row of the last request is that of the first."""

    one_in = 5000

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        if self._loses():
            output[-1] = output[0]
        return output, lse


RACES = (OrderOfAdditions, OrderOfSplits, UnfinishedTile, StaleRow, LastBit, RarestRow)
