"""Honest indexers that differ legitimately from EAGER's: the judge must accept every one of them."""

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.defects.tensor_core import added
from mla_conformance.reference.selected import NO_KEY


class NarrowTiles(EagerIndexerBackend):
    """Tiles of 16 tokens, and anything behind a row's bound."""

    token_tile = 16

    def run_index_logits(self, q, weights, k, k_scale=None):
        return super().run_index_logits(q, weights, k, k_scale).nan_to_num(neginf=torch.nan)


class HeadAfterHead(EagerIndexerBackend):
    """Heads are added one after another, the last one first."""

    def _scores(self, q, weights, keys):
        scores = q.new_zeros(len(q), len(keys))
        for head in reversed(range(q.shape[1])):
            scores += weights[:, head, None] * (q[:, head] @ keys.mT).relu()
        return scores


class ScalesBehindTheSum(EagerIndexerBackend):
    """Codes of keys are multiplied as they are; scores take the scale."""

    def _scales(self, scales):
        self._behind = scales
        return torch.ones_like(scales)

    def _scores(self, q, weights, keys):
        return super()._scores(q, weights, keys) * self.__dict__.pop("_behind", keys.new_ones(1, 1)).mT


class RoundedKeys(EagerIndexerBackend):
    """Codes are dequantised to bfloat16, and declared so."""

    declaration = Declaration(rounding=Rounding(dequantised_keys=Precision.MODEL), emulated=True)

    def _keys(self, k, k_scale, request, positions):
        keys = super()._keys(k, k_scale, request, positions)
        return keys if self.kv_cache_dtype == "auto" else keys.bfloat16().float()


class TruncatedSums(EagerIndexerBackend):
    """Products of q and k are added as Hopper's tensor cores add those of codes, and declared so."""

    token_tile = 64
    declaration = Declaration(rounding=Rounding(accumulation=Precision.FP22), emulated=True)

    def _scores(self, q, weights, keys):
        if self.kv_cache_dtype == "auto":
            return super()._scores(q, weights, keys)
        rows = q.flatten(0, 1)
        (dots,) = added(rows.new_zeros(1, len(rows), len(keys)), rows[None], keys.mT[None])
        return (weights.unsqueeze(1) @ dots.view(*q.shape[:2], -1).relu()).squeeze(1)


class AscendingTokens(EagerIndexerBackend):
    """The selected tokens are told in their order, those of equal scores that come last are taken, -1 stands first."""

    def _choose(self, logits, topk_tokens):
        flipped = super()._choose(logits.flip(1), topk_tokens)
        return torch.where(flipped == NO_KEY, NO_KEY, logits.shape[1] - 1 - flipped).sort(dim=1).values


HONEST_INDEXERS: tuple[type[KernelBackend], ...] = (
    EagerIndexerBackend,
    NarrowTiles,
    HeadAfterHead,
    ScalesBehindTheSum,
    RoundedKeys,
    TruncatedSums,
    AscendingTokens,
)
"""Every honest emulation of an indexer."""
