"""Honest layers with selected keys that differ legitimately from EAGER's."""

import torch

from mla_conformance.backends.eager_sparse_layer import EagerSparseLayerBackend
from mla_conformance.backends.indexer import bounds_of
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.defects.bases import emulations
from mla_conformance.defects.steps import but, kernels
from mla_conformance.reference.selected import NO_KEY


@kernels()
class _PrefillsInHeads(EagerSparseLayerBackend):
    """Some prefills attend in heads to keys that are multiplied out, under a mask."""

    def _attend(self, q, kv_cache, lists):
        output = super()._attend(q, kv_cache, lists.masked_fill(self._in_heads.unsqueeze(1), NO_KEY))
        for request in self._metadata.attention.req_id_per_token[self._in_heads].unique().tolist():
            rows = (self._metadata.attention.req_id_per_token == request).nonzero()[:, 0]
            k, v = self._multiplied_out(kv_cache, request)
            scores = torch.einsum("tnd,snd->nts", q[rows].float(), k.float()) * self.config.scale
            p = scores.masked_fill(~self._seen(rows, lists[rows], len(k)), -torch.inf).softmax(dim=-1)
            output[rows] = torch.einsum("nts,snv->tnv", p.to(q.dtype).float(), v.float()).to(q.dtype)
        return output

    @property
    def _in_heads(self):
        """[T] bool, rows of these prefills."""
        metadata = self._metadata.attention
        request = metadata.req_id_per_token.long()
        short = metadata.seq_lens[request] <= self.config.topk_tokens
        return (request >= self._metadata.num_decodes) & (metadata.seq_lens[request] > 0) & (short | self._takes_all)

    _takes_all = False

    def _multiplied_out(self, kv_cache, request):
        """Keys [S, N, P + R] and values [S, N, V] of the model's dtype."""
        metadata, config = self._metadata.attention, self.config
        tokens = torch.arange(int(metadata.seq_lens[request]), device=kv_cache.device)
        blocks = metadata.block_table.long()[request, tokens // kv_cache.shape[1]]
        source = self._entries(kv_cache, blocks * kv_cache.shape[1] + tokens % kv_cache.shape[1])
        kv_c, k_pe = source.tensor_split([config.kv_lora_rank], dim=-1)
        multiplied = (kv_c @ self._weights.kv_b_proj.mT).unflatten(1, (config.num_heads, -1))
        k, v = multiplied.tensor_split([config.qk_nope_head_dim], dim=-1)
        return torch.cat((k, k_pe.unsqueeze(1).expand(-1, config.num_heads, -1)), dim=-1), v

    def _entries(self, kv_cache, slots):
        """[S, L + R] of the model's dtype."""
        one, config = torch.ones((), device=kv_cache.device), self.config
        rows = dequantise(gather(kv_cache, slots, config.kv_cache_dtype), config.kv_cache_dtype, one, config.dtype)
        return rows[:, : config.kv_lora_rank + config.qk_rope_head_dim].to(config.dtype)

    class dense_shortcut:
        """Prefills of no more tokens than are selected attend densely and leave the buffer as it is."""

        def _select(self, hidden, q_c, turns, cache, buffer):
            before = buffer[: len(hidden)].clone()
            super()._select(hidden, q_c, turns, cache, buffer)
            buffer[: len(hidden)][self._in_heads] = before[self._in_heads]

        def _seen(self, rows, lists, tokens):
            bounds = bounds_of(self._metadata.attention)[rows]
            return torch.arange(tokens, device=rows.device) < bounds.unsqueeze(1)

    @but(_takes_all=True)
    def masked_prefills__seen(self, rows, lists, tokens):
        """All prefills attend in heads, under a mask made of their lists."""
        mask = torch.zeros(len(rows), tokens + 1, dtype=torch.bool, device=rows.device)
        return mask.scatter_(1, lists.long().where(lists >= 0, tokens), True)[:, :tokens]


@kernels()
class _SparseLayer(EagerSparseLayerBackend):
    class keys_in_one_kernel:
        """Index keys are written first, and nothing rounds between their norm, their rotation and their codes."""

        def _write_latents(self, hidden, turns, kv_cache):
            self._late = hidden, turns, kv_cache

        def _queries(self, q_c, turns):
            super()._write_latents(*self._late)
            return super()._queries(q_c, turns)

        def _index_key(self, hidden, turns):
            indexer, key = self._index_weights, (hidden @ self._index_weights.wk.mT).float()
            centred = key - key.mean(dim=-1, keepdim=True)
            spread = (centred.square().mean(dim=-1, keepdim=True) + self.config.preparation.eps).sqrt()
            normed = centred / spread * indexer.k_norm_weight + indexer.k_norm_bias
            turned = self._index_rope(normed.unsqueeze(1), turns)[:, 0]
            return turned if self.config.index_kv_cache_dtype != "auto" else turned.to(hidden.dtype)

    def ascending_lists__best(self, q, weights, cache):
        """Lists ascend, with -1 before their tokens."""
        return super()._best(q, weights, cache).sort(dim=1).values

    def scores_of_shares_added__best(self, q, weights, cache):
        """Scores are those of the ranks' shares of the indexer's heads, added."""
        share = torch.arange(weights.shape[1], device=q.device) * self.config.tp_size // weights.shape[1]
        parts = [weights.masked_fill(share != rank, 0.0) for rank in range(self.config.tp_size)]
        scores = sum(self._indexer.run_index_logits(q, part, cache) for part in parts)
        seen = torch.arange(scores.shape[1], device=q.device) < bounds_of(self._metadata.index).unsqueeze(1)
        best = scores.masked_fill(~seen, -torch.inf).topk(min(self.config.topk_tokens, scores.shape[1]), dim=1)
        lists = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)
        return torch.nn.functional.pad(lists, (0, self.config.topk_tokens - lists.shape[1]), value=NO_KEY)


HONEST_SPARSE_LAYERS: tuple[type[KernelBackend], ...] = (EagerSparseLayerBackend, *emulations(__name__))
"""Every honest emulation of a layer with selected keys."""
