"""Honest kernels over selected keys, and indexers, that differ legitimately from EAGER's."""

from dataclasses import replace
from functools import reduce
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.defects.bases import added, declares, emulations, joined, stored_in, through_e8m0
from mla_conformance.defects.steps import but, kernels
from mla_conformance.reference.selected import NO_KEY


class SplitLists(EagerSparseBackend):
    """Three splits of each list, combined by their LSEs, and a state for each cache; outputs in the model's dtype."""

    splits = 3
    declaration = declares(Rounding(partial_outputs=Precision.MODEL))

    def _attend(self, q, request, sources, k_scale):
        parts = [self._part(source, number) for source in sources for number in range(self.splits)]
        states = [super(SplitLists, self)._attend(q, request, [part], k_scale) for part in parts]
        return reduce(joined, [stored_in(state, self._model_dtype) for state in states])

    def _part(self, source, number):
        """Every third column of a list."""
        length = source.length if source.length is None else (source.length - number + self.splits - 1) // self.splits
        return replace(source, indices=source.indices[:, number :: self.splits], length=length)


@kernels()
class _Sparse(EagerSparseBackend):
    @but(key_tile=16)
    def column_tiles__tiles(self, keys):
        """Tiles of 16 columns, the last first."""
        return iter(list(super()._tiles(keys))[::-1])

    class shared_unions:
        """Neighbouring rows gather the union of their lists once, and each masks what it does not name."""

        supports_duplicates: ClassVar[bool] = False

        def attend(self, q, sources, k_scale, sink):
            rows, request = torch.arange(len(q), device=q.device), self._sparse_metadata.req_id_per_token
            pair = (rows ^ 1).clamp(max=len(q) - 1)
            pair = torch.where(request[pair] == request, pair, rows)  # lists of two requests may count different keys
            return super().attend(q, [self._union(source, pair) for source in sources], k_scale, sink)

        def _union(self, source, pair):
            """Lists of twice as many columns, in one order for both rows of a pair; what is not the row's own is -1."""
            own = source.indices.masked_fill(~self._listed(source), NO_KEY).sort(dim=1).values
            both = torch.cat((own, own[pair]), dim=1).sort(dim=1).values
            first = torch.nn.functional.pad(both[:, 1:] != both[:, :-1], (1, 0), value=True)
            place = torch.searchsorted(own, both).clamp(max=own.shape[1] - 1)
            named = own.gather(1, place) == both
            return replace(source, indices=both.masked_fill(~(first & named), NO_KEY), length=None)

    @but(declaration=declares(Rounding(dequantised_keys=Precision.MODEL)))
    def selected_in_the_models_dtype__keys(self, source, slots, visible, k_scale):
        """Codes are dequantised to the model's dtype, and declared so."""
        return super()._keys(source, slots, visible, k_scale).to(self._model_dtype).float()

    @but(supported_tile_scales=["pow2"])
    def scales_of_powers_of_two__behind_entries(self, rows, *, source):
        """The scales of tiles pass through e8m0, which holds powers of two, and no others are declared."""
        return through_e8m0(rows) if source.layout == "fp8_ds_mla" else rows


@kernels()
class _Indexer(EagerIndexerBackend):
    @but(token_tile=16)
    def narrow_tiles__run_index_logits(self, q, weights, k, k_scale=None):
        """Tiles of 16 tokens, and anything behind a row's bound."""
        return super().run_index_logits(q, weights, k, k_scale).nan_to_num(neginf=torch.nan)

    def head_after_head__scores(self, q, weights, keys):
        """Heads are added one after another, the last one first."""
        scores = q.new_zeros(len(q), len(keys))
        for head in reversed(range(q.shape[1])):
            scores += weights[:, head, None] * (q[:, head] @ keys.mT).relu()
        return scores

    class scales_behind_the_sum:
        """Codes of keys are multiplied as they are; scores take the scale."""

        def _scales(self, scales):
            self._behind = scales
            return torch.ones_like(scales)

        def _scores(self, q, weights, keys):
            return super()._scores(q, weights, keys) * self.__dict__.pop("_behind", keys.new_ones(1, 1)).mT

    @but(declaration=declares(Rounding(dequantised_keys=Precision.MODEL)))
    def rounded_keys__behind_keys(self, keys):
        """Codes are dequantised to bfloat16, and declared so."""
        return keys if self.kv_cache_dtype == "auto" else keys.bfloat16().float()

    @but(token_tile=64, declaration=declares(Rounding(accumulation=Precision.FP22)))
    def truncated_sums__scores(self, q, weights, keys):
        """Products of q and k are added as Hopper's tensor cores add those of codes, and declared so."""
        if self.kv_cache_dtype == "auto":
            return super()._scores(q, weights, keys)
        rows = q.flatten(0, 1)
        (dots,) = added(rows.new_zeros(1, len(rows), len(keys)), rows[None], keys.mT[None])
        return (weights.unsqueeze(1) @ dots.view(*q.shape[:2], -1).relu()).squeeze(1)

    def ascending_tokens__choose(self, logits, topk_tokens):
        """The selected tokens are told in their order, those of equal scores that come last are taken, -1 stands
        first."""
        flipped = super()._choose(logits.flip(1), topk_tokens)
        return torch.where(flipped == NO_KEY, NO_KEY, logits.shape[1] - 1 - flipped).sort(dim=1).values


HONEST_SPARSE: tuple[type[KernelBackend], ...] = (EagerSparseBackend, EagerIndexerBackend, *emulations(__name__))
"""Every honest emulation of a sparse kernel, and of an indexer."""
