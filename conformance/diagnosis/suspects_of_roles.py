"""Suspects of one role each: masks, rows and columns of packed batches, pages, ends of lists, and scales of codes."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax, SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.known import but
from mla_conformance.defects.prefills import LiftedMaximum
from mla_conformance.diagnosis.suspects import LIFTED, SUSPECTS, DividesByZero, Suspect


class StrictMask(EagerPrefillBackend):
    """The causal mask is off by one: no query sees its own key, so that the first one sees none."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


class _StrictMask(StrictMask):
    class strict_mask_divides_by_zero(DividesByZero):
        """The causal mask is off by one: no query sees its own key, and the first one's output is 0 / 0."""


class _Prefill(EagerPrefillBackend):
    def scale_of_head_dim__scores(self, q, k):
        """The softmax scale is (P + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5

    def scale_of_latent__scores(self, q, k):
        """The softmax scale is (L + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5

    def leaked_key__visible(self, queries, keys, tile, device):
        """The causal mask is off by one: a query sees the key after its own."""
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries + 1
        return torch.arange(tile.start, tile.stop, device=device) <= last

    def hidden_key__visible(self, queries, keys, tile, device):
        """The causal mask is off by one: a query does not see its own key."""
        last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1).clamp(min=0)
        return torch.arange(tile.start, tile.stop, device=device) <= last

    def no_mask__visible(self, queries, keys, tile, device):
        """There is no causal mask."""
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)

    def first_key_dropped__behind_visible(self, visible, *, tile):
        """The first key of a request is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0)

    def last_key_dropped__attend(self, q, k, v, causal):
        """The last key of a request is dropped."""
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])

    def last_page_dropped__attend(self, q, k, v, causal):
        """The last, partly filled page of a context's keys is dropped (of pages of 16, for example)."""
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)

    def contiguous_values__before_batch(self, v):
        """V is read as if it were packed."""
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        missing = v.numel() - packed.numel()
        return torch.cat([packed, flat.new_zeros(missing)]).view(v.shape)

    def shifted_values__before_attend(self, v):
        """V is sliced one column off."""
        return v.roll(1, -1)

    def swapped_requests__batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        """The keys of the first two requests are swapped."""
        if len(key_start_loc) < 3:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        a, b = key_start_loc[1], key_start_loc[2]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)

    def first_chunk_always__run_prefill_context_chunk(self, chunk_idx, q, k, v):
        """The chunk index is ignored: every chunk of a context is attended to with the lengths of the first one."""
        # Behind the keys of a shorter chunk stands what is no number.
        missing = int(self._prefill_metadata.chunked_context.cu_seq_lens[0][-1]) - k.shape[0]
        k, v = (torch.cat([x, x.new_full((max(missing, 0), *x.shape[1:]), torch.nan)]) for x in (k, v))
        kept = k.shape[0] + min(missing, 0)
        return super().run_prefill_context_chunk(0, q, k[:kept], v[:kept])

    def rows_never_written__behind_batch(self, output, lse):
        """Only the first rows are ever written (the first 64, for example)."""
        output[64:] = torch.nan

    def output_scale_twice__before_quantise(self, accumulated, *, output_scale):
        """The quantised output is divided by its scale twice."""
        return accumulated / output_scale

    def output_scale_left_out__before_quantise(self, output_scale):
        """The quantised output is not divided by its scale."""
        return torch.ones_like(output_scale)


class _Decode(EagerDecodeBackend):
    def scale_of_latent_queries__scores(self, q, k):
        """The softmax scale is (L + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5

    def own_token_hidden__behind_visible(self, visible, *, seq_len):
        """The causal mask is off by one: a query does not see its own token."""
        nothing = torch.zeros_like(visible[:, :1])
        return torch.cat((visible[:, 1:], nothing), dim=1) if seq_len > 1 else visible

    def leaked_token__behind_visible(self, visible):
        """The causal mask is off by one: a query sees the token after its own, if its request has one."""
        return torch.cat((visible[1:], visible[-1:]))

    def last_token_dropped__before_attend(self, seq_len):
        """The last token of a request's cache is dropped."""
        return max(seq_len - 1, min(seq_len, 1))

    def first_token_dropped__behind_visible(self, visible, *, seq_len, tile):
        """The first token of a request's cache is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible

    def last_page_of_tokens_dropped__before_attend(self, seq_len, *, kv_cache):
        """The last, partly filled page of a request's cache is dropped."""
        page = kv_cache.shape[1]
        return seq_len // page * page or seq_len

    @but(covers=("rocm-fp8-gluon-batch1-only",))
    def table_of_first_request__before_blocks(self, request):
        """Every request reads the pages of the first one."""
        return 0

    @but(covers=("cutlass-mla-claims-fp8-without-scales", "fp8-compile-cache-folds-unit-scale"))
    def key_scale_left_out__before_dequantise(self, k_scale):
        """The scale of the e4m3 cache is not applied."""
        return torch.ones_like(k_scale)

    def key_scale_twice__before_dequantise(self, k_scale):
        """The scale of the e4m3 cache is applied twice."""
        return k_scale * k_scale

    def key_scale_inverted__before_dequantise(self, k_scale):
        """Codes of the e4m3 cache are divided by their scale, expected multiplied."""
        return 1 / k_scale

    def key_scale_off_the_rope__dequantise(self, rows, k_scale):
        """The scale of the e4m3 cache is not applied to the rope part of the keys."""
        rope = super()._dequantise(rows, torch.ones_like(k_scale))[..., self.kv_lora_rank :]
        return torch.cat((super()._dequantise(rows, k_scale)[..., : self.kv_lora_rank], rope), dim=-1)

    @but(covers=("fp8-mla-k-scale-vs-v-scale-inconsistent",))
    def key_scale_of_keys_only__values__dequantise(self, keys, *, k_scale):
        """The scale of the e4m3 cache is applied to the keys and not to the values."""
        return super()._values(keys) / (k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale))


class _OffTheTable(EagerDecodeBackend):
    """Reads other blocks than its own, of those that there are."""

    def _entries(self, kv_cache, request, tile):
        self._last = kv_cache.shape[0] - 1
        return super()._entries(kv_cache, request, tile)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last)


class _BlockTable(_OffTheTable):
    def column_after__before_blocks(self, pages):
        """The block table is read off by one: each page of a request from the column after its own."""
        return pages + 1

    def column_before__before_blocks(self, pages):
        """The block table is read off by one: each page of a request from the column before its own."""
        return (pages - 1).clamp(min=0)

    def row_after__before_blocks(self, request):
        """The block table is read off by one: each request takes the row of the next one."""
        return (request + 1) % self._decode_metadata.block_table.shape[0]

    def block_after__behind_blocks(self, blocks):
        """The block table is read off by one: each page from the block after the one that it names."""
        return (blocks + 1).clamp(max=self._last)

    def block_before__behind_blocks(self, blocks):
        """The block table is read off by one: each page from the block before the one that it names."""
        return (blocks - 1).clamp(min=0)


class RaisedAtFirst(EagerSparseBackend):
    """The maximum of a row that has seen tiles and no key is 0; where all weights vanish, the output is 0 / 0."""

    def _initial(self, q, v):
        self._is_first = True
        return super()._initial(q, v)

    def _accumulate(self, state, scores, v):
        begins = (state.maximum == -torch.inf) & (scores > -torch.inf).any(dim=-1, keepdim=True)
        raised = state.maximum if self._is_first else state.maximum.masked_fill(begins, 0.0)
        self._is_first = False
        return super()._accumulate(state._replace(maximum=raised), scores, v)

    def _finish(self, state):
        output, lse = super()._finish(state)
        vanished = (state.total == 0) & (state.maximum > -torch.inf)
        return output.masked_fill(vanished.transpose(0, 1), torch.nan), lse


class SkipsTiles(LiftedMaximum, EagerDecodeBackend):
    """Only a tile that the next query token sees raises a maximum: rows share tiles, and those behind are skipped."""

    def _accumulate(self, state, scores, v):
        seen = (scores > -torch.inf).any(dim=-1, keepdim=True)
        skipped = ~seen & ~torch.nn.functional.pad(seen[:, 1:], (0, 0, 0, 1))
        raised = super()._accumulate(state, scores, v)
        return SoftmaxState(*(torch.where(skipped, *pair) for pair in zip(state, raised, strict=True)))


class _LseOfTheParts(OnlineSoftmax):
    """What vanishes from the output is not missing in the LSE, which is joined from what the tiles had."""

    def _initial(self, q, v):
        self._joined = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return super()._initial(q, v)

    def _accumulate(self, state, scores, v):
        self._joined = torch.logaddexp(self._joined, scores.logsumexp(dim=-1))
        return super()._accumulate(state, scores, v)

    def _finish(self, state):
        return super()._finish(state)[0], self._joined


class RaisesForTheOutput(_LseOfTheParts, LiftedMaximum, EagerDecodeBackend):
    """Every tile without keys."""


class SkipsTilesOfTheOutput(_LseOfTheParts, SkipsTiles):
    """Those that the next query token sees."""


class _Sparse(EagerSparseBackend):
    def last_key_of_a_list_dropped__behind_listed(self, listed):
        """The last key of each list is dropped."""
        return listed & (listed.cumsum(1) < listed.sum(dim=1, keepdim=True))

    def first_key_of_a_list_dropped__behind_listed(self, listed):
        """The first key of each list is dropped."""
        return listed & (listed.cumsum(1) > 1)

    def sink_subtracted__before_with_sink(self, sink):
        """A sink has the wrong sign."""
        return None if sink is None else -sink

    def key_scale_of_lists_twice__before_keys(self, k_scale):
        """The scale of the e4m3 cache is applied to selected keys twice."""
        return k_scale * k_scale


SUSPECTS += [
    Suspect(StrictMask),
    *(_StrictMask, _Prefill, _Decode, _BlockTable),
    Suspect(RaisedAtFirst, LIFTED, {"key_tile": (16, 32, 64, 128, 256)}, LiftedMaximum.__doc__),
    *(
        Suspect(kernel, LIFTED, {"key_tile": (16, 32, 64, 128)}, LiftedMaximum.__doc__)
        for kernel in (SkipsTiles, RaisesForTheOutput, SkipsTilesOfTheOutput)
    ),
    _Sparse,
]
