"""Suspects of one role each: masks, rows and columns of packed batches, pages, ends of lists, and scales of codes."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.online_softmax import OnlineSoftmax, SoftmaxState
from mla_conformance.defects.prefills import LiftedMaximum
from mla_conformance.diagnosis.suspects import SUSPECTS, DividesByZero, suspect, suspect_tiles

__all__ = ["SUSPECTS"]  # those of every role, then these


@suspect("scale")
class ScaleOfHeadDim(EagerPrefillBackend):
    """The softmax scale is (P + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5


@suspect("scale")
class ScaleOfLatent(EagerPrefillBackend):
    """The softmax scale is (L + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5


@suspect("indexing")
class LeakedKey(EagerPrefillBackend):
    """The causal mask is off by one: a query sees the key after its own."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries + 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("indexing")
class HiddenKey(EagerPrefillBackend):
    """The causal mask is off by one: a query does not see its own key."""

    def _visible(self, queries, keys, tile, device):
        last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1).clamp(min=0)
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("indexing")
class StrictMask(EagerPrefillBackend):
    """The causal mask is off by one: no query sees its own key, so that the first one sees none."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("indexing")
class StrictMaskDividesByZero(DividesByZero, StrictMask):
    """The causal mask is off by one: no query sees its own key, and the first one's output is 0 / 0."""


@suspect("indexing")
class NoMask(EagerPrefillBackend):
    """There is no causal mask."""

    def _visible(self, queries, keys, tile, device):
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)


@suspect("indexing")
class LastKeyDropped(EagerPrefillBackend):
    """The last key of a request is dropped."""

    def _attend(self, q, k, v, causal):
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])


@suspect("indexing")
class LastPageDropped(EagerPrefillBackend):
    """The last, partly filled page of a context's keys is dropped (of pages of 16, for example)."""

    def _attend(self, q, k, v, causal):
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)


@suspect("indexing")
class ContiguousValues(EagerPrefillBackend):
    """V is read as if it were packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        missing = v.numel() - packed.numel()
        packed = torch.cat([packed, flat.new_zeros(missing)]).view(v.shape)
        return super()._batch(q, k, packed, query_start_loc, key_start_loc, causal)


@suspect("indexing")
class ShiftedValues(EagerPrefillBackend):
    """V is sliced one column off."""

    def _attend(self, q, k, v, causal):
        return super()._attend(q, k, v.roll(1, -1), causal)


@suspect("indexing")
class SwappedRequests(EagerPrefillBackend):
    """The keys of the first two requests are swapped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if len(key_start_loc) < 3:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        a, b = key_start_loc[1], key_start_loc[2]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)


@suspect("indexing")
class FirstChunkAlways(EagerPrefillBackend):
    """The chunk index is ignored: every chunk of a context is attended to with the lengths of the first one."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        # Behind the keys of a shorter chunk stands what is no number.
        missing = int(self._prefill_metadata.chunked_context.cu_seq_lens[0][-1]) - k.shape[0]
        k, v = (torch.cat([x, x.new_full((max(missing, 0), *x.shape[1:]), torch.nan)]) for x in (k, v))
        kept = k.shape[0] + min(missing, 0)
        return super().run_prefill_context_chunk(0, q, k[:kept], v[:kept])


@suspect("indexing")
class RowsNeverWritten(EagerPrefillBackend):
    """Only the first rows are ever written (the first 64, for example)."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output[64:] = torch.nan
        return output, lse


@suspect("precision")
class OutputScaleTwice(EagerPrefillBackend):
    """The quantised output is divided by its scale twice."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated / output_scale, output_scale)


@suspect("precision")
class OutputScaleLeftOut(EagerPrefillBackend):
    """The quantised output is not divided by its scale."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated, torch.ones_like(output_scale))


@suspect("scale")
class ScaleOfLatentQueries(EagerDecodeBackend):
    """The softmax scale is (L + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5


@suspect("decode_softmax")
class OwnTokenHidden(EagerDecodeBackend):
    """The causal mask is off by one: a query does not see its own token."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        nothing = torch.zeros_like(visible[:, :1])
        return torch.cat((visible[:, 1:], nothing), dim=1) if seq_len > 1 else visible


@suspect("decode_cache")
class LastTokenDropped(EagerDecodeBackend):
    """The last token of a request's cache is dropped."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        return super()._attend(q, request, max(seq_len - 1, min(seq_len, 1)), kv_cache, k_scale)


@suspect("decode_cache")
class FirstTokenDropped(EagerDecodeBackend):
    """The first token of a request's cache is dropped."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible


@suspect("decode_cache")
class LastPageOfTokensDropped(EagerDecodeBackend):
    """The last, partly filled page of a request's cache is dropped."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        page = kv_cache.shape[1]
        return super()._attend(q, request, seq_len // page * page or seq_len, kv_cache, k_scale)


@suspect("decode_cache", "rocm-fp8-gluon-batch1-only")
class TableOfFirstRequest(EagerDecodeBackend):
    """Every request reads the pages of the first one."""

    def _blocks(self, request, pages):
        return super()._blocks(0, pages)


@suspect("decode_cache", "cutlass-mla-claims-fp8-without-scales", "fp8-compile-cache-folds-unit-scale")
class KeyScaleLeftOut(EagerDecodeBackend):
    """The scale of the e4m3 cache is not applied."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, torch.ones_like(k_scale))


@suspect("decode_cache")
class KeyScaleTwice(EagerDecodeBackend):
    """The scale of the e4m3 cache is applied twice."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, k_scale * k_scale)


@suspect("decode_cache")
class KeyScaleInverted(EagerDecodeBackend):
    """Codes of the e4m3 cache are divided by their scale, expected multiplied."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, 1 / k_scale)


@suspect("decode_cache")
class KeyScaleOffTheRope(EagerDecodeBackend):
    """The scale of the e4m3 cache is not applied to the rope part of the keys."""

    def _dequantise(self, rows, k_scale):
        rope = super()._dequantise(rows, torch.ones_like(k_scale))[..., self.kv_lora_rank :]
        return torch.cat((super()._dequantise(rows, k_scale)[..., : self.kv_lora_rank], rope), dim=-1)


@suspect("decode_cache", "fp8-mla-k-scale-vs-v-scale-inconsistent")
class KeyScaleOfKeysOnly(EagerDecodeBackend):
    """The scale of the e4m3 cache is applied to the keys and not to the values."""

    def _values(self, keys):
        return super()._values(keys) / self._scale_of_cache

    def _dequantise(self, rows, k_scale):
        self._scale_of_cache = k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale)
        return super()._dequantise(rows, k_scale)


@suspect("sparse_lists")
class LastKeyOfAListDropped(EagerSparseBackend):
    """The last key of each list is dropped."""

    def _listed(self, source):
        listed = super()._listed(source)
        return listed & (listed.cumsum(1) < listed.sum(dim=1, keepdim=True))


@suspect("sparse_lists")
class FirstKeyOfAListDropped(EagerSparseBackend):
    """The first key of each list is dropped."""

    def _listed(self, source):
        listed = super()._listed(source)
        return listed & (listed.cumsum(1) > 1)


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


suspect_tiles(RaisedAtFirst, 16, 32, 64, 128, 256)


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


for _kernel in (SkipsTiles, RaisesForTheOutput, SkipsTilesOfTheOutput):
    suspect_tiles(_kernel, 16, 32, 64, 128)


@suspect("sparse_lse")
class SinkSubtracted(EagerSparseBackend):
    """A sink has the wrong sign."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else -sink)


@suspect("sparse_entries")
class KeyScaleOfListsTwice(EagerSparseBackend):
    """The scale of the e4m3 cache is applied to selected keys twice."""

    def _keys(self, source, slots, visible, k_scale):
        return super()._keys(source, slots, visible, k_scale * k_scale)
