"""Wrong layers with selected keys: their shortcut, their lists and buffers, slots, rotations, scales and order."""

from dataclasses import replace

import torch

from mla_conformance.backends import eager_sparse_layer, indexer, roles
from mla_conformance.defects.bases import kept, note, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, together
from mla_conformance.reference.selected import NO_KEY


class _WithLists(eager_sparse_layer.EagerSparseLayerBackend, Defects):
    """Attention to lists that are changed on their way."""

    def _attend(self, q, kv_cache, lists):
        return super()._attend(q, kv_cache, self._changed(lists))

    @property
    def _request(self):
        return self._metadata.attention.req_id_per_token.long()

    @property
    def _prefills(self):
        return self._request >= self._metadata.num_decodes

    def _changed(self, lists):
        """In rows [T] bool, the first tokens of their request, as many as lengths [T] say."""
        lengths, rows = self._whole(indexer.bounds_of(self._metadata.attention))
        longest = max(int(lengths.max()), lists.shape[1])
        every = torch.arange(longest, dtype=lists.dtype, device=lists.device).expand(len(lists), -1)
        every = every.masked_fill(every >= lengths.unsqueeze(1), NO_KEY)
        wide = torch.nn.functional.pad(lists, (0, longest - lists.shape[1]), value=NO_KEY)
        return wide.where(~rows.unsqueeze(1), every)

    sparse_layer_dense_in_place_of_the_selection = instead("whole", lambda self, bounds: (bounds, self._prefills))
    sparse_layer_shared_taken_for_dense = instead("whole", lambda self, x: (x, (x > 0) & self.config.skip_topk))

    def sparse_layer_dense_shortcut_not_causal__whole(self, bounds):
        lengths = self._metadata.attention.seq_lens[self._request]
        return lengths, self._prefills & (lengths <= self.config.topk_tokens)

    sparse_layer_shortcut_of_one_token_more = instead("whole", lambda self, x: (x, x == self.config.topk_tokens + 1))

    def sparse_layer_shortcut_by_new_tokens__whole(self, bounds):
        new = self._metadata.attention.query_start_loc.diff()[self._request]
        return bounds, self._prefills & (new <= self.config.topk_tokens)

    def sparse_layer_prefill_lists_count_the_batch__changed(self, lists):
        lengths = self._metadata.attention.seq_lens.clone()
        lengths[: self._metadata.num_decodes] = 0
        first = (lengths.cumsum(0) - lengths)[self._request].unsqueeze(1).to(lists.dtype)
        return lists.where(~self._prefills.unsqueeze(1) | (lists == NO_KEY), lists - first).clamp(min=NO_KEY)

    def sparse_layer_shared_selects_by_itself__whole(self, bounds):
        return bounds.clamp(max=self.config.topk_tokens), (bounds > 0) & self.config.skip_topk

    @but(when=lambda self: self.config.skip_topk)
    def sparse_layer_shared_rows_of_prefills_from_zero__changed(self, lists):
        decodes = int(self._metadata.attention.query_start_loc[self._metadata.num_decodes])
        moved = torch.cat((lists[:decodes], lists[: len(lists) - decodes]))
        return moved.masked_fill(moved >= indexer.bounds_of(self._metadata.attention).unsqueeze(1), NO_KEY)


class _SparseLayer(eager_sparse_layer.EagerSparseLayerBackend, Defects):
    sparse_layer_index_keys_in_latent_slots = instead("index_slots", lambda self: self._latent_slots())
    sparse_layer_indexer_not_rotated = instead("index_rope", lambda self, x, turns: x)
    sparse_layer_query_scales_forgotten = behind("codes", lambda codes, scale: (codes, torch.ones_like(scale)))
    sparse_layer_query_scales_twice = behind("codes", lambda codes, scale: (codes, scale.square()))
    sparse_layer_selects_before_it_writes = together(
        instead("write_index_keys", lambda self, *written: note(self, _late=written)),
        behind("select", lambda self, _: super()._write_index_keys(*self._late)),
    )
    sparse_layer_head_weights_forgotten = together(
        behind("codes", lambda self, codes, scale: note(self, _scale=scale)),
        before(
            "best",
            lambda self, weights, *, q: (
                weights / (weights.abs() + (weights == 0)) * (self._scale if q.dtype == torch.float8_e4m3fn else 1)
            ),
        ),
    )

    def sparse_layer_selection_of_the_first_step__best(self, q, weights, cache):
        return kept(self, len(q), super()._best(q, weights, cache))

    def sparse_layer_requests_of_the_first_step__attend(self, q, kv_cache, lists):
        attention = self._metadata.attention
        requests = kept(self, len(q), attention.req_id_per_token.clone())
        taken = replace(attention, req_id_per_token=requests.clamp(max=len(attention.seq_lens) - 1))
        self._attention.prepare_metadata(taken)
        return super()._attend(q, kv_cache, lists.minimum(indexer.bounds_of(taken).unsqueeze(1) - 1))

    @but(when=lambda self: self.config.skip_topk)
    def sparse_layer_shared_buffer_cleared__behind_attend(self, _, *, lists):
        lists.fill_(NO_KEY)

    def sparse_layer_padding_written_to_the_last_slot__behind_latent_slots__write_latents(self, slots, *, kv_cache):
        return slots.where(slots >= 0, slots_of(kv_cache) - 1)

    def sparse_layer_indexer_rotates_the_layers_pairs__before_rope(self, is_neox_style):
        return self.config.is_neox_style

    @but(when=lambda x: x.shape[1] == 1)
    def sparse_layer_index_keys_rotated_otherwise__index_rope(self, x, turns):
        part, rest = x.tensor_split([turns.shape[1]], dim=-1)
        return torch.cat((self._rope(part, turns, self.config.preparation.is_neox_style), rest), dim=-1)

    def sparse_layer_positions_taken_for_slots__attend(self, q, kv_cache, lists):
        self._attention.prepare_metadata(replace(self._metadata.attention, index_space=roles.IndexSpace.SLOT))
        return super()._attend(q, kv_cache, lists)

    def sparse_layer_own_token_always_selected__best(self, q, weights, cache):
        best, own = super()._best(q, weights, cache), indexer.bounds_of(self._metadata.index) - 1
        best[:, -1] = torch.where((best != own.unsqueeze(1)).all(dim=1) & (own >= 0), own, best[:, -1])
        return best

    def sparse_layer_buffer_not_cleared__select(self, hidden, q_c, turns, cache, buffer):
        best, before = buffer[: len(hidden)], buffer[: len(hidden)].clone()
        super()._select(hidden, q_c, turns, cache, buffer)
        best.copy_(best.where(best != NO_KEY, before))

    def sparse_layer_index_keys_by_latent_blocks__best(self, q, weights, cache):
        table = self._metadata.attention.block_table.clamp(0, len(cache) - 1)
        self._indexer.prepare_metadata(replace(self._metadata.index, block_table=table))
        return super()._best(q, weights, cache)

    def sparse_layer_index_keys_in_rmsnorm__index_key(self, hidden, turns):
        own, key = self._index_weights, (hidden @ self._index_weights.wk.mT).float()
        size = (key.square().mean(dim=-1, keepdim=True) + self.config.preparation.eps).sqrt()
        normed = (key / size * own.k_norm_weight + own.k_norm_bias).to(hidden.dtype)
        return self._index_rope(normed.unsqueeze(1), turns)[:, 0]

    def sparse_layer_index_norm_without_bias__before_load_weights(self, weights):
        own = weights.indexer
        return replace(weights, indexer=own and replace(own, k_norm_bias=torch.zeros_like(own.k_norm_bias)))

    def sparse_layer_indexer_before_the_query_norm__before_select(self, q_c, *, hidden):
        return hidden @ self._weights.q_a_proj.mT

    @but("before_index_rope__run_sparse_layer")
    def sparse_layer_index_turns_from_zero(self, turns, *, positions, cos_sin_cache):
        metadata = self._metadata.index
        first = metadata.query_start_loc.long()[metadata.req_id_per_token.long()]
        place = torch.arange(len(positions), device=positions.device) - first
        return cos_sin_cache[place.clamp(0, len(cos_sin_cache) - 1)]

    def sparse_layer_ranks_share_the_indexers_heads__before_best(self, weights):
        others = torch.ones_like(weights, dtype=torch.bool)
        others.tensor_split(self.config.tp_size, dim=1)[self.config.tp_rank].fill_(False)
        return weights.masked_fill(others, 0.0)

    def sparse_layer_first_rank_writes_index_keys__write_index_keys(self, *operands):
        if self.config.tp_rank == 0:
            super()._write_index_keys(*operands)

    def sparse_layer_first_rank_writes_latents__write_latents(self, *operands):
        if self.config.tp_rank == 0:
            super()._write_latents(*operands)

    def sparse_layer_part_of_the_last_rank_counts_twice__behind_run_sparse_layer(self, part):
        return part * (1 + (0 < self.config.tp_rank == self.config.tp_size - 1))
