"""Wrong layers with selected keys: their shortcut, their lists and buffers, slots, rotations, scales and order."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse_layer import EagerSparseLayerBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.indexer import bounds_of
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY


class _WithLists(EagerSparseLayerBackend):
    """Attention to lists that are changed on their way."""

    def _attend(self, q, kv_cache, lists):
        return super()._attend(q, kv_cache, self._changed(lists))

    @property
    def _request(self):
        """[T], of each row."""
        return self._metadata.attention.req_id_per_token.long()

    @property
    def _prefills(self):
        """[T] bool."""
        return self._request >= self._metadata.num_decodes

    def _all_up_to(self, lists, lengths, rows):
        """Lists as they are, but for rows [T] bool: the first tokens of their request, as many as lengths [T] say."""
        longest = max(int(lengths.max()), lists.shape[1])
        every = torch.arange(longest, dtype=lists.dtype, device=lists.device).expand(len(lists), -1)
        every = every.masked_fill(every >= lengths.unsqueeze(1), NO_KEY)
        wide = torch.nn.functional.pad(lists, (0, longest - lists.shape[1]), value=NO_KEY)
        return wide.where(~rows.unsqueeze(1), every)


@known_defect("sparse-layer-dense-shortcut-not-causal", killed_by="sparse_layer_dense_shortcut")
class ShortcutSeesAll(_WithLists):
    """The dense shortcut of prefills shows tokens behind a row's own."""

    def _changed(self, lists):
        lengths = self._metadata.attention.seq_lens[self._request]
        return self._all_up_to(lists, lengths, self._prefills & (lengths <= self.config.topk_tokens))


@known_defect("sparse-layer-dense-in-place-of-the-selection", killed_by="sparse_layer")
class PrefillsDense(_WithLists):
    """Prefills attend to every token up to their own, whatever was selected."""

    def _changed(self, lists):
        return self._all_up_to(lists, bounds_of(self._metadata.attention), self._prefills)


@known_defect(
    "sparse-layer-shortcut-of-one-token-more",
    killed_by="sparse_layer_dense_shortcut",
    related=("sparse_layer", "sparse_layer_shared_indices"),
)
class ShortcutOffByOne(_WithLists):
    """A row that sees one token more than are selected attends to all of them."""

    def _changed(self, lists):
        bounds = bounds_of(self._metadata.attention)
        return self._all_up_to(lists, bounds, bounds == self.config.topk_tokens + 1)


@known_defect("sparse-layer-shortcut-by-new-tokens", killed_by="sparse_layer")
class ShortcutByNewTokens(_WithLists):
    """A prefill of few new tokens takes the dense shortcut, however long its context is."""

    def _changed(self, lists):
        new = self._metadata.attention.query_start_loc.diff()[self._request]
        short = self._prefills & (new <= self.config.topk_tokens)
        return self._all_up_to(lists, bounds_of(self._metadata.attention), short)


@known_defect("sparse-layer-positions-taken-for-slots", killed_by="sparse_layer")
class PositionsAsSlots(EagerSparseLayerBackend):
    """Selected positions are read as slots of the latent cache."""

    def _attend(self, q, kv_cache, lists):
        self._attention.prepare_metadata(replace(self._metadata.attention, index_space=IndexSpace.SLOT))
        return super()._attend(q, kv_cache, lists)


@known_defect("sparse-layer-prefill-lists-count-the-batch", killed_by="sparse_layer")
class ListsCountTheBatch(_WithLists):
    """The lists of prefills are taken to count the keys of all prefills, one request behind the other."""

    def _changed(self, lists):
        lengths = self._metadata.attention.seq_lens.clone()
        lengths[: self._metadata.num_decodes] = 0
        first = (lengths.cumsum(0) - lengths)[self._request].unsqueeze(1).to(lists.dtype)
        shifted = lists.where(~self._prefills.unsqueeze(1) | (lists == NO_KEY), lists - first)
        return shifted.clamp(min=NO_KEY)


@known_defect("sparse-layer-own-token-always-selected", killed_by="sparse_layer")
class OwnTokenSelected(EagerSparseLayerBackend):
    """A row's own token is always among the selected ones."""

    def _best(self, q, weights, cache):
        best, own = super()._best(q, weights, cache), bounds_of(self._metadata.index) - 1
        missing = (best != own.unsqueeze(1)).all(dim=1)
        best[:, -1] = torch.where(missing & (own >= 0), own, best[:, -1])
        return best


@known_defect("sparse-layer-buffer-not-cleared", killed_by="sparse_layer")
class BufferNotCleared(EagerSparseLayerBackend):
    """A row that sees fewer tokens than are selected leaves what stood behind them in the buffer."""

    def _select(self, hidden, q_c, turns, cache, buffer):
        before = buffer[: len(hidden)].clone()
        super()._select(hidden, q_c, turns, cache, buffer)
        best = buffer[: len(hidden)]
        best.copy_(best.where(best != NO_KEY, before))


@known_defect("sparse-layer-selection-of-the-first-step", killed_by="sparse_layer_graph")
class SelectionOfTheFirstStep(EagerSparseLayerBackend):
    """The selection of the first step is kept for all steps of as many tokens, as if it had been captured."""

    def _best(self, q, weights, cache):
        self._kept = self.__dict__.get("_kept", {})
        return self._kept.setdefault(len(q), super()._best(q, weights, cache))


@known_defect("sparse-layer-shared-buffer-cleared", killed_by="sparse_layer_shared_indices")
class SharedBufferCleared(EagerSparseLayerBackend):
    """A layer without an indexer clears the buffer behind its attention, so that the next one finds nothing."""

    def _attend(self, q, kv_cache, lists):
        output = super()._attend(q, kv_cache, lists)
        if self.config.skip_topk:
            lists.fill_(NO_KEY)
        return output


@known_defect("sparse-layer-shared-taken-for-dense", killed_by="sparse_layer_shared_indices")
class SharedTakenForDense(_WithLists):
    """A layer without an indexer attends to every token up to a row's own."""

    def _changed(self, lists):
        bounds = bounds_of(self._metadata.attention)
        return self._all_up_to(lists, bounds, (bounds > 0) & self.config.skip_topk)


@known_defect("sparse-layer-shared-selects-by-itself", killed_by="sparse_layer_shared_indices")
class SharedSelectsByItself(_WithLists):
    """A layer without an indexer selects by weights never loaded: the first tokens win."""

    def _changed(self, lists):
        lengths = bounds_of(self._metadata.attention).clamp(max=self.config.topk_tokens)
        return self._all_up_to(lists, lengths, (lengths > 0) & self.config.skip_topk)


@known_defect("sparse-layer-shared-rows-of-prefills-from-zero", killed_by="sparse_layer_shared_indices")
class SharedRowsFromZero(_WithLists):
    """A layer without an indexer takes the lists of its prefills from the beginning of the buffer."""

    def _changed(self, lists):
        if not self.config.skip_topk:
            return lists
        decodes = int(self._metadata.attention.query_start_loc[self._metadata.num_decodes])
        moved = torch.cat((lists[:decodes], lists[: len(lists) - decodes]))
        return moved.masked_fill(moved >= bounds_of(self._metadata.attention).unsqueeze(1), NO_KEY)


@known_defect("sparse-layer-index-keys-in-latent-slots", killed_by="sparse_layer")
class IndexKeysInLatentSlots(EagerSparseLayerBackend):
    """Index keys are written to the slots of the latent cache."""

    def _index_slots(self):
        return self._latent_slots()


@known_defect("sparse-layer-index-keys-by-latent-blocks", killed_by="sparse_layer")
class IndexKeysByLatentBlocks(EagerSparseLayerBackend):
    """The indexer finds its keys by the block table of the latent cache."""

    def _best(self, q, weights, cache):
        table = self._metadata.attention.block_table.clamp(0, len(cache) - 1)
        self._indexer.prepare_metadata(replace(self._metadata.index, block_table=table))
        return super()._best(q, weights, cache)


@known_defect("sparse-layer-padding-written-to-the-last-slot", killed_by="sparse_layer_caches")
class PaddingWritten(EagerSparseLayerBackend):
    """Slot -1 of padding is the last slot of the cache."""

    def _write_latents(self, hidden, turns, kv_cache):
        self._last = kv_cache.shape[0] * kv_cache.shape[1] - 1
        super()._write_latents(hidden, turns, kv_cache)

    def _latent_slots(self):
        slots = super()._latent_slots()
        return slots.where(slots >= 0, self._last)


@known_defect("sparse-layer-selects-before-it-writes", killed_by="sparse_layer")
class SelectsBeforeItWrites(EagerSparseLayerBackend):
    """Tokens are selected before the index keys of the step stand in the cache."""

    def _write_index_keys(self, hidden, turns, cache):
        self._late = hidden, turns, cache

    def _select(self, hidden, q_c, turns, cache, buffer):
        super()._select(hidden, q_c, turns, cache, buffer)
        super()._write_index_keys(*self._late)


@known_defect(
    "sparse-layer-indexer-rotates-the-layers-pairs",
    killed_by="sparse_layer_conventions",
    related=("sparse_layer", "sparse_layer_dense_shortcut"),
)
class LayersPairs(EagerSparseLayerBackend):
    """The indexer rotates the pairs that the layer rotates."""

    def _index_rope(self, x, turns):
        form = self.config.preparation._replace(is_neox_style=self.config.is_neox_style)
        own, self.config = self.config, self.config._replace(preparation=form)
        try:
            return super()._index_rope(x, turns)
        finally:
            self.config = own


@known_defect(
    "sparse-layer-index-keys-rotated-otherwise", killed_by="sparse_layer_conventions", related=("sparse_layer",)
)
class KeysRotatedOtherwise(EagerSparseLayerBackend):
    """Index queries are rotated in the indexer's columns, index keys always in the first ones."""

    def _index_rope(self, x, turns):
        if x.shape[1] > 1:
            return super()._index_rope(x, turns)
        part, rest = x.tensor_split([turns.shape[1]], dim=-1)
        return torch.cat((self._rope(part, turns, self.config.preparation.is_neox_style), rest), dim=-1)


@known_defect("sparse-layer-index-keys-in-rmsnorm", killed_by="sparse_layer")
class KeysInRMSNorm(EagerSparseLayerBackend):
    """Index keys pass through an RMSNorm, which leaves their mean in them."""

    def _index_key(self, hidden, turns):
        own, key = self._index_weights, (hidden @ self._index_weights.wk.mT).float()
        size = (key.square().mean(dim=-1, keepdim=True) + self.config.preparation.eps).sqrt()
        normed = (key / size * own.k_norm_weight + own.k_norm_bias).to(hidden.dtype)
        return self._index_rope(normed.unsqueeze(1), turns)[:, 0]


@known_defect("sparse-layer-indexer-not-rotated", killed_by="sparse_layer")
class IndexerNotRotated(EagerSparseLayerBackend):
    """Neither queries nor keys of the indexer are rotated."""

    def _index_rope(self, x, turns):
        return x


@known_defect("sparse-layer-index-norm-without-bias", killed_by="sparse_layer")
class NormWithoutBias(EagerSparseLayerBackend):
    """Index keys pass through a norm without its bias."""

    def load_weights(self, weights):
        own = weights.indexer
        none = own and replace(own, k_norm_bias=torch.zeros_like(own.k_norm_bias))
        super().load_weights(replace(weights, indexer=none))


@known_defect("sparse-layer-indexer-before-the-query-norm", killed_by="sparse_layer")
class IndexerBeforeTheNorm(EagerSparseLayerBackend):
    """The indexer's queries are projected from the latent before its norm."""

    def _select(self, hidden, q_c, turns, cache, buffer):
        super()._select(hidden, hidden @ self._weights.q_a_proj.mT, turns, cache, buffer)


@known_defect("sparse-layer-query-scales-forgotten", killed_by="sparse_layer")
class QueryScalesForgotten(EagerSparseLayerBackend):
    """The weights of the heads do not take the scales of the queries' codes."""

    def _codes(self, q):
        codes, scale = super()._codes(q)
        return codes, torch.ones_like(scale)


@known_defect("sparse-layer-query-scales-twice", killed_by="sparse_layer")
class QueryScalesTwice(EagerSparseLayerBackend):
    """The weights of the heads take the scales of the queries' codes twice."""

    def _codes(self, q):
        codes, scale = super()._codes(q)
        return codes, scale.square()


@known_defect("sparse-layer-head-weights-forgotten", killed_by="sparse_layer")
class HeadWeightsForgotten(EagerSparseLayerBackend):
    """The heads of the indexer have one weight."""

    def _best(self, q, weights, cache):
        scale = weights / (weights.abs() + (weights == 0))
        if q.dtype == torch.float8_e4m3fn:
            scale = scale * self._scale
        return super()._best(q, scale, cache)

    def _codes(self, q):
        codes, self._scale = super()._codes(q)
        return codes, self._scale


@known_defect("sparse-layer-index-turns-from-zero", killed_by="sparse_layer")
class IndexTurnsFromZero(EagerSparseLayerBackend):
    """The indexer rotates by a token's place among the new ones of its request, not by its position."""

    def run_sparse_layer(self, hidden_states, positions, cos_sin_cache, **caches):
        metadata = self._metadata.index
        first = metadata.query_start_loc.long()[metadata.req_id_per_token.long()]
        place = torch.arange(len(positions), device=positions.device) - first
        self._own_turns = cos_sin_cache[place.clamp(0, len(cos_sin_cache) - 1)]
        return super().run_sparse_layer(hidden_states, positions, cos_sin_cache, **caches)

    def _index_rope(self, x, turns):
        return super()._index_rope(x, self._own_turns)


@known_defect("sparse-layer-ranks-share-the-indexers-heads", killed_by="sparse_layer_ranks")
class IndexerOnItsShareOfHeads(EagerSparseLayerBackend):
    """Each rank scores by its share of the indexer's heads, and nobody adds the scores."""

    def _best(self, q, weights, cache):
        shares = torch.arange(weights.shape[1], device=weights.device).tensor_split(self.config.tp_size)
        own = torch.zeros_like(weights)
        own[:, shares[self.config.tp_rank]] = weights[:, shares[self.config.tp_rank]]
        return super()._best(q, own, cache)


@known_defect("sparse-layer-first-rank-writes-index-keys", killed_by="sparse_layer_ranks")
class FirstRankWritesIndexKeys(EagerSparseLayerBackend):
    """The indexer has no heads to share, so the first rank alone writes its keys."""

    def _write_index_keys(self, hidden, turns, cache):
        if self.config.tp_rank == 0:
            super()._write_index_keys(hidden, turns, cache)


@known_defect("sparse-layer-first-rank-writes-latents", killed_by="sparse_layer_ranks")
class FirstRankWritesLatents(EagerSparseLayerBackend):
    """Latents have no heads to share, so the first rank alone writes them."""

    def _write_latents(self, hidden, turns, kv_cache):
        if self.config.tp_rank == 0:
            super()._write_latents(hidden, turns, kv_cache)


@known_defect("sparse-layer-part-of-the-last-rank-counts-twice", killed_by="sparse_layer_ranks")
class LastPartTwice(EagerSparseLayerBackend):
    """The part of the output that the last rank has is added twice."""

    def run_sparse_layer(self, hidden_states, positions, cos_sin_cache, **caches):
        part = super().run_sparse_layer(hidden_states, positions, cos_sin_cache, **caches)
        return part * (1 + (0 < self.config.tp_rank == self.config.tp_size - 1))
