"""Honest compressors, and selections over pools, that differ legitimately from EAGER's."""

import torch

from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.defects.bases import emulations
from mla_conformance.defects.steps import kernels


@kernels()
class _Compress(EagerCompressBackend):
    def running_softmax__pooled(self, k, logits):
        """Tokens are added one after the other, the last first, under a running maximum."""
        maximum = torch.full_like(k[:, 0], -torch.inf)
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for token in reversed(range(k.shape[1])):
            higher = torch.maximum(maximum, logits[:, token])
            shift = higher.masked_fill(higher == -torch.inf, 0.0)
            before, own = (maximum - shift).exp(), (logits[:, token] - shift).exp()
            total, weighted = total * before + own, weighted * before + own * k[:, token]
            maximum = higher
        return weighted / total

    def rounds_before_the_rotation__before_rotated__run_compress(self, entries, *, kv_cache):
        """A normalised entry is rounded to the cache's dtype before it is rotated, as V4.1's is."""
        return entries.to(kv_cache.dtype).float()

    class places_when_pooled:
        """States hold scores as they came; what belongs to places is added while they are pooled, in float64."""

        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            self._ape = ape
            super().run_compress(kv, score, torch.zeros_like(ape), norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _pooled(self, k, logits):
            at = torch.cat(self._ape.chunk(2 if self.compression.overlap else 1, dim=1))
            return super()._pooled(k.double(), logits.double() + at).float()

    class from_the_call_itself:
        """Tokens of the call are read as they came, states only for those before it; nothing but begun groups is
        stored."""

        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            metadata = self._compress_metadata
            logits = score.float() + ape[self._places(metadata.positions)]
            self._own = torch.cat((kv.float(), logits), dim=1)
            super().run_compress(kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _state_slots(self):
            metadata, span = self._compress_metadata, self.compression.ratio
            first = (metadata.seq_lens.long() // span - int(self.compression.overlap)) * span
            needed = metadata.positions >= first[metadata.req_id_per_token.long()]
            return super()._state_slots().where(needed, -1)

        def _gathered(self, state_cache, ends):
            k, logits = super()._gathered(state_cache, ends)
            positions, metadata = self._window(ends), self._compress_metadata
            own = metadata.req_id_per_token[ends].long()
            begun = (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[own].unsqueeze(1)
            row = (metadata.query_start_loc.long()[own].unsqueeze(1) + positions - begun).clamp(min=0)
            here = ((positions >= begun) & (positions >= 0)).unsqueeze(-1)
            new_k, new_logits = map(self._halves, self._own[row].chunk(2, dim=-1))
            return torch.where(here, new_k, k), torch.where(here, new_logits, logits)


@kernels()
class _TopK(EagerTopKBackend):
    class tail_before_pools:
        """The tokens of the last pool stand first, and -1 between them and those of pools in rising order."""

        def run_pool_top_k_per_row(self, logits, topk_tokens, pool, tail):
            return super().run_pool_top_k_per_row(logits, topk_tokens, pool, tail).flip(1)

        def _expanded(self, pools, pool):
            return super()._expanded(pools.sort(dim=1).values, pool)


HONEST_COMPRESSORS: tuple[type[KernelBackend], ...] = (EagerCompressBackend, *emulations(__name__))
"""Every honest emulation of a compressor, and of a selection over pools."""
