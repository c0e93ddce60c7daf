"""Suspects of a decode whose numbers depend on how a kernel cuts the keys: splits, their merge, values of a tile."""

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import SplitDecode
from mla_conformance.defects.decode_caches import ReadsOn
from mla_conformance.diagnosis.suspects import NotRescaled, Suspect
from mla_conformance.diagnosis.suspects_of_roles import SUSPECTS

_COUNTS = (2, 3, 4, 8)
_CUTS = tuple((count, multiple, least) for count in _COUNTS for multiple, least in ((1, 1), (1, 16), (32, 1), (64, 1)))
_DOWN = tuple((count, 0, 16) for count in _COUNTS)
_FIXED = tuple((0, size, size) for size in (64, 128, 256, 512))


class _Splits(SplitDecode):
    """Splits as kernels choose them.

    Attributes:
        cut: how many there are at most, or 0 for as many as it takes; what the size is rounded up to a multiple of, or
            0 if it is rounded down and the last split takes the rest; the least size.
    """

    prefill_backend = None  # type: ignore[assignment] # so that no layer has it
    cut: tuple[int, int, int]

    def _starts(self, seq_len):
        count, multiple, least = self.cut
        share = 0 if not count else -(-seq_len // (count * multiple)) * multiple if multiple else seq_len // count
        return range(0, seq_len, max(share, least))[: count or None]


class MergedInBase2(_Splits):
    """Splits are weighted by powers of two of their natural LSE, expected powers of e."""

    merges_lse: bool

    def _combine(self, parts):
        right = super()._combine(parts)
        lses = [part.maximum + part.total.log() for part in parts]
        largest = torch.stack(lses).amax(dim=0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = [(lse - shift).exp2() for lse in lses]
        total = torch.stack(weights).sum(dim=0)
        outputs = [part.weighted / part.total.masked_fill(part.total == 0, 1.0) for part in parts]
        weighted = torch.stack([weight * part for weight, part in zip(weights, outputs, strict=True)]).sum(dim=0)
        if self.merges_lse:
            return SoftmaxState(shift, total, weighted)
        return right._replace(weighted=weighted / total.masked_fill(total == 0, 1.0) * right.total)


class NotRescaledInSplits(NotRescaled, _Splits):
    """As in one pass over the keys."""


class RestTimesZero(ReadsOn):
    """What stands after a request's last key has weights of 0, and 0 times NaN is NaN."""

    def _tail(self, state, q, keys):
        return state._replace(weighted=state.weighted + (0.0 * self._values(keys)).sum(dim=(0, 1)))


class PackedValues(EagerDecodeBackend):
    """V is read as if it were packed: rows of L columns, expected the first L of each L + R."""

    def _values(self, keys):
        flat = keys.flatten()[: keys.shape[0] * self.kv_lora_rank]
        return flat.view(keys.shape[0], 1, self.kv_lora_rank)


class PackedValuesOfTheCache(EagerDecodeBackend):
    __doc__ = PackedValues.__doc__

    def _over(self, tiles, q, request, seq_len, kv_cache, k_scale):
        blocks, page, _ = kv_cache.shape
        bytes_of = kv_cache.view(torch.uint8).flatten()
        width = self.kv_lora_rank * kv_cache.element_size()
        packed = bytes_of[: blocks * page * width].view(blocks, page, width).view(kv_cache.dtype)
        self._packed = lambda tile: super(PackedValuesOfTheCache, self)._dequantise(
            self._entries(packed, request, tile), k_scale
        )
        return super()._over(self._noted(tiles), q, request, seq_len, kv_cache, k_scale)

    def _noted(self, tiles):
        for self._tile in tiles:
            yield self._tile

    def _values(self, keys):
        return self._packed(self._tile).unsqueeze(1)


SUSPECTS += [
    Suspect(MergedInBase2, of={"cut": (*_CUTS, *_DOWN, *_FIXED), "merges_lse": (False, True)}),
    Suspect(
        NotRescaledInSplits,
        of={"key_tile": (16, 32, 64, 128), "cut": (*_CUTS[::4], *_CUTS[1::4], *_DOWN)},
        said=NotRescaled.__doc__,
    ),
    Suspect(
        RestTimesZero,
        covers=(
            "mla-last-page-nan-leak",
            "tma-overread-uninitialised-kv-tile",
            "aiter-oob-page-id-folds-to-slot0-nan",
        ),
    ),
    Suspect(PackedValues, of={"key_tile": (16, 32, 64, 128, 2**31)}),
    Suspect(PackedValuesOfTheCache),
]
