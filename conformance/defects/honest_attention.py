"""Honest decodes, trees, kernels over selected keys, indexers, and layers with both, that differ from EAGER's."""

from dataclasses import replace
from functools import reduce
from itertools import product
from typing import ClassVar

import torch

from mla_conformance.backends import eager_indexer, eager_sparse, eager_sparse_layer, eager_tree
from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.declaration import LseClass, Precision
from mla_conformance.backends.indexer import bounds_of
from mla_conformance.defects import bases
from mla_conformance.defects.known import Honest, before, behind, but, instead, together, variant
from mla_conformance.reference.selected import NO_KEY

_MODEL_KEYS = bases.declares(dequantised_keys=Precision.MODEL)
_TINY = bases.declares(p=Precision.SCALED_E4M3, dequantised_keys=Precision.MODEL)
_HOPPER = bases.declares(accumulation=Precision.FP22)


def _as_the_model(self, keys):
    return keys.to(self._model_dtype).float()


class _LayeredDecode(bases.LayeredDecode, Honest):
    keys_of_the_model = behind("dequantise", _as_the_model, declaration=_MODEL_KEYS)
    tiny_weights = behind("dequantise", _as_the_model, on=(bases.NarrowP,), declaration=_TINY)
    split_tokens = variant(bases.Parts, parts=5, key_tile=32)
    stored_splits = variant(bases.Parts, parts=5, key_tile=32, stored=True, declaration=bases.STORED)
    page_tiles = variant(key_tile=16)
    wide_tiles = variant(key_tile=1024)
    last_tile_first = behind("tiles", lambda tiles: reversed(list(tiles)))
    unrounded_weights = instead("round_p", lambda self, p, dtype: p)
    half_precision_weights = variant(bases.NarrowP, declaration=bases.declares(p=Precision.FLOAT16))
    powers_of_two = variant(bases.BaseTwo)
    scaled_scores = together(
        before("dequantise", k_scale=torch.ones_like),
        behind("scores__over", lambda scores, *, k_scale: scores * k_scale),
        behind("values__over", lambda values, *, k_scale: values * k_scale),
        when=bases.codes,
    )

    @but(declaration=bases.declares(lse=LseClass.APPROXIMATE_EXP))
    def rough_exponential__exp(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() if self._model_dtype is torch.float32 else bases.rough_exp(x)


class _Trees(eager_tree.EagerTreeBackend, Honest):
    tree_in_tiles_of_16 = variant(key_tile=16)
    tree_at_once = variant(key_tile=4096)

    def tree_by_an_added_bias__over(self, tiles, q, request, seq_len, kv_cache, k_scale):
        state = self._initial(q, q[..., : self.kv_lora_rank])
        for tile in tiles:
            keys = self._dequantise(self._entries(kv_cache, request, tile), k_scale).unsqueeze(1)
            bias = self._visible(q.shape[0], request, seq_len, tile).float().log()
            state = self._accumulate(state, self._scores(q, keys) + bias, self._values(keys))
        return state

    def tree_behind_its_context__attend(self, q, request, seq_len, kv_cache, k_scale):
        context = max(0, seq_len - q.shape[0])
        parts = (self._tiles(context), [slice(context, seq_len)] if seq_len else [])
        return reduce(bases.joined, [self._over(tiles, q, request, seq_len, kv_cache, k_scale) for tiles in parts])

    def tree_by_packed_bits__behind_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Masks are packed to bytes, the first bit lowest, and read from these."""
        bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8)
        data = (bits * weights).sum(dim=1)
        return ((data.unsqueeze(1) & weights) > 0).flatten()[: mask.numel()].view_as(mask)


class _Sparse(eager_sparse.EagerSparseBackend, Honest):
    finite_sparse = behind("maximum", bases.finite, key_tile=64)
    sparse_in_base_two = variant(bases.BaseTwo, key_tile=32)
    capturable_sparse = variant(bases.Capturable)
    half_weights_of_lists = variant(bases.NarrowP, declaration=bases.declares(p=Precision.FLOAT16))
    scaled_codes_of_lists = variant(bases.NarrowP, key_tile=64, declaration=bases.declares(p=Precision.SCALED_E4M3))

    @but(key_tile=64)
    class tree_of_tiles:
        def _accumulate(self, state, scores, v):
            self._states.append(super()._accumulate(self._fresh, scores, v))
            return state

        def _attend(self, q, request, sources, k_scale):
            self._states = []
            queries = q.transpose(0, 1)
            self._fresh = self._initial(queries, queries[..., : self.kv_lora_rank])
            super()._attend(q, request, sources, k_scale)
            return bases.joined_in_a_tree(self._states)

    @but(when=lambda sink: sink is not None)
    def sink_among_the_keys__with_sink(self, output, lse, sink):
        logits = torch.stack(torch.broadcast_tensors(lse, sink.unsqueeze(1)))
        share = logits.softmax(dim=0)[0].where(sink.unsqueeze(1) < torch.inf, 0.0)
        return output * share.nan_to_num(0.0).mT.unsqueeze(-1)

    @but(declaration=bases.STORED)
    def split_lists___attend(self, q, request, sources, k_scale):
        """Three splits of each list, combined by their LSEs, a state for each cache; outputs in the model's dtype."""
        states = []
        for source, number in product(sources, range(3)):
            length = None if source.length is None else (source.length - number + 2) // 3
            part = replace(source, indices=source.indices[:, number::3], length=length)
            states.append(bases.stored_in(super()._attend(q, request, [part], k_scale), self._model_dtype))
        return reduce(bases.joined, states)

    column_tiles = behind("tiles", lambda tiles: reversed(list(tiles)), key_tile=16)

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
            named = own.gather(1, torch.searchsorted(own, both).clamp(max=own.shape[1] - 1)) == both
            return replace(source, indices=both.masked_fill(~(first & named), NO_KEY), length=None)

    selected_in_the_models_dtype = behind("keys", _as_the_model, declaration=_MODEL_KEYS)

    @but(supported_tile_scales=["pow2"])
    def scales_of_powers_of_two__behind_entries(self, rows, *, source):
        return bases.through_e8m0(rows) if source.layout == "fp8_ds_mla" else rows


class _Indexer(eager_indexer.EagerIndexerBackend, Honest):
    @but(token_tile=16)
    def narrow_tiles__run_index_logits(self, q, weights, k, k_scale=None):
        """Tiles of 16 tokens, and anything behind a row's bound."""
        return super().run_index_logits(q, weights, k, k_scale).nan_to_num(neginf=torch.nan)

    def head_after_head__scores(self, q, weights, keys):
        scores = q.new_zeros(len(q), len(keys))
        for head in reversed(range(q.shape[1])):
            scores += weights[:, head, None] * (q[:, head] @ keys.mT).relu()
        return scores

    class scales_behind_the_sum:
        def _scales(self, scales):
            self._behind = scales
            return torch.ones_like(scales)

        def _scores(self, q, weights, keys):
            return super()._scores(q, weights, keys) * self.__dict__.pop("_behind", keys.new_ones(1, 1)).mT

    @but(declaration=_MODEL_KEYS)
    def rounded_keys__behind_keys(self, keys):
        return keys if self.kv_cache_dtype == "auto" else keys.bfloat16().float()

    @but(token_tile=64, declaration=_HOPPER, when=lambda self: self.kv_cache_dtype != "auto")
    def truncated_sums__scores(self, q, weights, keys):
        """Products of q and k are added as Hopper's tensor cores add those of codes, and declared so."""
        rows = q.flatten(0, 1)
        (dots,) = bases.added(rows.new_zeros(1, len(rows), len(keys)), rows[None], keys.mT[None])
        return (weights.unsqueeze(1) @ dots.view(*q.shape[:2], -1).relu()).squeeze(1)

    def ascending_tokens__choose(self, logits, topk_tokens):
        """Selected tokens are told in their order behind -1; of those with equal scores the last are taken."""
        return bases.mirrored(super()._choose, logits, topk_tokens).sort(dim=1).values

    def best_of_the_best__choose(self, logits, topk_tokens):
        """The best of each 64 tokens are selected first, then the best of all those."""
        choose = super()._choose
        chosen = [choose(part, min(64, topk_tokens)) for part in logits.split(64, dim=1)]
        behind = [torch.where(each == NO_KEY, NO_KEY, each + 64 * number) for number, each in enumerate(chosen)]
        finalists = torch.cat(behind, dim=1)
        scores = logits.gather(1, finalists.clamp(min=0)).masked_fill(finalists == NO_KEY, -torch.inf)
        best = choose(scores, topk_tokens)
        return torch.where(best == NO_KEY, NO_KEY, finalists.gather(1, best.clamp(min=0)))


class _PrefillsInHeads(eager_sparse_layer.EagerSparseLayerBackend, Honest):
    """Some prefills attend in heads to keys that are multiplied out, under a mask."""

    _takes_all = False

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
        metadata, request = self._metadata.attention, self._metadata.attention.req_id_per_token.long()
        short = metadata.seq_lens[request] <= self.config.topk_tokens
        return (request >= self._metadata.num_decodes) & (metadata.seq_lens[request] > 0) & (short | self._takes_all)

    def _multiplied_out(self, kv_cache, request):
        """Keys [S, N, P + R] and values [S, N, V] of the model's dtype."""
        metadata, config, page = self._metadata.attention, self.config, kv_cache.shape[1]
        tokens = torch.arange(int(metadata.seq_lens[request]), device=kv_cache.device)
        slots = metadata.block_table.long()[request, tokens // page] * page + tokens % page
        one, layout = torch.ones((), device=kv_cache.device), config.kv_cache_dtype
        rows = dequantise(gather(kv_cache, slots, layout), layout, one, config.dtype).to(config.dtype)
        kv_c, k_pe, _ = rows.tensor_split([config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim], dim=-1)
        multiplied = (kv_c @ self._weights.kv_b_proj.mT).unflatten(1, (config.num_heads, -1))
        k, v = multiplied.tensor_split([config.qk_nope_head_dim], dim=-1)
        return torch.cat((k, k_pe.unsqueeze(1).expand(-1, config.num_heads, -1)), dim=-1), v

    class dense_shortcut:
        def _select(self, hidden, q_c, turns, cache, buffer):
            before = buffer[: len(hidden)].clone()
            super()._select(hidden, q_c, turns, cache, buffer)
            buffer[: len(hidden)][self._in_heads] = before[self._in_heads]

        def _seen(self, rows, lists, tokens):
            bounds = bounds_of(self._metadata.attention)[rows]
            return torch.arange(tokens, device=rows.device) < bounds.unsqueeze(1)

    @but(_takes_all=True)
    def masked_prefills__seen(self, rows, lists, tokens):
        mask = torch.zeros(len(rows), tokens + 1, dtype=torch.bool, device=rows.device)
        return mask.scatter_(1, lists.long().where(lists >= 0, tokens), True)[:, :tokens]


class _SparseLayer(eager_sparse_layer.EagerSparseLayerBackend, Honest):
    ascending_lists = behind("best", lambda lists: lists.sort(dim=1).values)

    class keys_in_one_kernel:
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

    def scores_of_shares_added__best(self, q, weights, cache):
        share = torch.arange(weights.shape[1], device=q.device) * self.config.tp_size // weights.shape[1]
        parts = [weights.masked_fill(share != rank, 0.0) for rank in range(self.config.tp_size)]
        scores = sum(self._indexer.run_index_logits(q, part, cache) for part in parts)
        seen = torch.arange(scores.shape[1], device=q.device) < bounds_of(self._metadata.index).unsqueeze(1)
        best = scores.masked_fill(~seen, -torch.inf).topk(min(self.config.topk_tokens, scores.shape[1]), dim=1)
        lists = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)
        return torch.nn.functional.pad(lists, (0, self.config.topk_tokens - lists.shape[1]), value=NO_KEY)
