"""Kernels and layers that are right until a batch has the heads, rows, chunks or lengths of another model."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import EagerLayer, SplitDecode, packed
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX


@known_defect("chunked-context-of-64-chunks", killed_by="model_shapes")
class SixtyFourChunks(EagerPrefillBackend):
    """There is room for 64 chunks of a context; a later one leaves an empty state."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        return (output, lse) if chunk_idx < 64 else (output * 0.0, torch.full_like(lse, -torch.inf))


@known_defect("output-index-in-two-bytes", killed_by="model_shapes")
class OutputIndexInTwoBytes(EagerPrefillBackend):
    """Rows times heads are counted in two bytes; what lies beyond 65,536 of them is not written."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output.flatten(0, 1)[65536:] = 0.0
        return output, lse


@known_defect("lse-of-256-rows-with-many-heads", killed_by="lse")
class LseOf256Rows(EagerPrefillBackend):
    """With more than 16 heads only the first 256 rows of new tokens get their LSE, others that of row 0."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if causal and self.num_heads > 16:
            lse[:, 256:] = lse[:, :1]
        return output, lse


@known_defect("merge-grid-of-8192-heads", killed_by="merge_states")
class MergeGrid(EagerPrefillBackend):
    """The merge has 8192 blocks, one for each row and head; what lies beyond keeps the later part."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        super().merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
        output.view(-1, output.shape[-1])[8192:] = suffix_output.flatten(0, 1)[8192:].to(output.dtype)


@known_defect("quant-output-unsaturated-with-lse", killed_by="quant_output_fp8")
class UnsaturatedBesideTheLse(EagerPrefillBackend):
    """The kernel that also returns the LSE stores NaN where a code should be saturated."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self._saturates = not return_softmax_lse
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)

    def _quantise(self, accumulated, output_scale):
        if self._saturates:
            return super()._quantise(accumulated, output_scale)
        scaled = accumulated / output_scale
        return scaled.masked_fill(scaled.abs() > E4M3_MAX, torch.nan).to(torch.float8_e4m3fn)


@known_defect("quant-output-unscaled-after-512-rows", killed_by="quant_output_fp8")
class UnscaledRows(EagerPrefillBackend):
    """The scale reaches the codes of the first 512 rows only."""

    def _quantise(self, accumulated, output_scale):
        codes = super()._quantise(accumulated, output_scale)
        rest = super()._quantise(accumulated[512:], torch.ones_like(output_scale))
        return torch.cat([codes[:512].view(torch.uint8), rest.view(torch.uint8)]).view(codes.dtype)


@known_defect("fp8-operands-of-16-heads", killed_by="fp8_operands")
class SixteenHeadsOfCodes(EagerPrefillBackend):
    """Keys in e4m3 are loaded for 16 heads; the others read those of the first 16."""

    def _widened(self, x):
        wide = super()._widened(x)
        heads = torch.arange(x.shape[1], device=x.device) % 16
        return wide if wide is x else wide[:, heads]


@known_defect("wide-heads-stop-at-1024-keys", killed_by="mla_dims")
class WideHeadsStop(EagerPrefillBackend):
    """For heads of 256 columns the loop over key tiles ends after 1024 keys."""

    def _attend(self, q, k, v, causal):
        keys = slice(1024 if q.shape[-1] == 256 else None)
        return super()._attend(q, k[keys], v[keys], causal)


@known_defect("wide-heads-assume-packed-rows", killed_by="mla_dims")
class WideHeadsPacked(EagerPrefillBackend):
    """Heads of 256 columns are read as if their rows were packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if q.shape[2] >= 256:
            q, k, v = (x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) for x in (q, k, v))
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("fp16-finite-sentinel-of-the-maximum", killed_by="shift_invariance")
class HalfSentinel(EagerPrefillBackend):
    """In fp16 the running maximum of the raw scores starts at -65504, the least number of that dtype."""

    def _initial(self, q, v):
        state = super()._initial(q, v)
        if q.dtype is not torch.float16:
            return state
        return state._replace(maximum=state.maximum.clamp(min=-65504 * self.scale))


@known_defect("decode-request-number-in-a-byte", killed_by="model_shapes")
class RequestInAByte(EagerDecodeBackend):
    """The number of a request is kept in a byte, so request 256 reads the pages of request 0."""

    def _blocks(self, request, pages):
        return super()._blocks(request % 256, pages)


@known_defect("decode-head-groups-share-four-splits", killed_by="model_shapes", related=("kv_cache_fp8_ds_mla",))
class FourSplitsOfTheSecondGroup(SplitDecode):
    """The second group of 64 heads has room for four splits, and drops what the others hold."""

    def _combine(self, parts):
        whole, four = super()._combine(parts), super()._combine(parts[:4])
        second = torch.arange(len(whole.total), device=whole.total.device).view(-1, 1, 1) >= 64
        return type(whole)(*(torch.where(second, b, a) for a, b in zip(whole, four, strict=True)))


@known_defect("decode-lse-of-first-split-with-many-heads", killed_by="decode_lse")
class LseOfTheFirstSplit(SplitDecode):
    """With 32 heads or more the LSE is that of the first split; the output is right."""

    split = 512

    def _combine(self, parts):
        state = super()._combine(parts)
        self._first = parts[0] if len(state.total) >= 32 else state
        return state

    def _finish(self, state):
        _, lse = super()._finish(self.__dict__.pop("_first", state))
        return super()._finish(state)[0], lse


@known_defect("decode-lse-of-128-rows", killed_by="decode_lse")
class LseOf128Rows(EagerDecodeBackend):
    """The LSE is written by one block of 128 threads, one for a query token: later ones keep 0."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        lse[:, 128:] = 0.0
        return output, lse


@known_defect("decode-grid-of-1024-heads", killed_by="model_shapes", related=("decode_lse",))
class GridOf1024Heads(EagerDecodeBackend):
    """A launch has 1024 blocks, one for each query token and head; what lies beyond is 0."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        output.flatten(0, 1)[1024:] = 0.0
        return output, lse


@known_defect("decode-heads-and-tokens-in-one-tile-of-256", killed_by="model_shapes", related=("decode_lse",))
class TilesOf256Rows(EagerDecodeBackend):
    """Heads and query tokens share a tile of 256 rows; the tokens of a second tile see one key less."""

    def _visible(self, queries, request, seq_len, tile):
        first = -(-256 // self.num_heads)
        visible = super()._visible(queries, request, seq_len, tile)
        return torch.cat([visible[:first], visible[first - 1 : -1]]) if first < queries else visible


@known_defect("decode-pages-of-32-with-several-tokens", killed_by="decode_multi_token")
class HalfPages(EagerDecodeBackend):
    """The kernel for several query tokens knows pages of 64, and reads those of 32 as halves of one."""

    def _blocks(self, request, pages):
        several = int(self._decode_metadata.query_lens_cpu.max()) > 1
        return super()._blocks(request, pages // 2 * 2 if several and self._page == 32 else pages)

    def _entries(self, kv_cache, request, tile):
        self._page = kv_cache.shape[1]
        return super()._entries(kv_cache, request, tile)


@known_defect("decode-page-number-in-two-bytes", killed_by="paged_cache")
class PageInTwoBytes(EagerDecodeBackend):
    """Page ids are packed into two bytes each."""

    def _blocks(self, request, pages):
        return super()._blocks(request, pages) & 0xFFFF


@known_defect("decode-codes-of-large-pages-unscaled", killed_by="kv_cache_fp8")
class LargePagesUnscaled(EagerDecodeBackend):
    """The kernel for pages of 128 codes ignores their scale."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        scale = torch.ones_like(k_scale) if kv_cache.shape[1] == 128 else k_scale
        return super().run_decode(ql_nope, q_pe, kv_cache, scale)


@known_defect("decode-codes-scaled-in-first-1024-keys", killed_by="kv_cache_fp8")
class ScaleOfTheFirstKeys(EagerDecodeBackend):
    """With 64 heads or more, only codes of the first 1024 keys are scaled."""

    def _entries(self, kv_cache, request, tile):
        self._beyond = tile.start >= 1024 and self.num_heads >= 64
        return super()._entries(kv_cache, request, tile)

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, torch.ones_like(k_scale) if self._beyond else k_scale)


@known_defect("dcp-rank-in-two-bits", killed_by="dcp")
class RankInTwoBits(EagerDecodeBackend):
    """The causal bound takes rank 4 for rank 0."""

    def _positions(self, metadata, tile):
        wrong = metadata.dcp_rank - metadata.dcp_rank % 4
        return super()._positions(metadata, tile) - wrong * metadata.cp_kv_cache_interleave_size


@known_defect("dcp-mixed-entries-bound-by-local-length", killed_by="dcp")
class LocalBoundOfMixedEntries(EagerDecodeBackend):
    """For a cache of mixed entries the causal bound counts the tokens of this rank."""

    def _visible(self, queries, request, seq_len, tile):
        if self.kv_cache_dtype != "fp8_ds_mla":
            return super()._visible(queries, request, seq_len, tile)
        last = torch.arange(seq_len - queries, seq_len).unsqueeze(1)
        return torch.arange(tile.start, tile.stop) <= last


@known_defect("dcp-assumes-packed-pages", killed_by="decode_combinations")
class PackedPagesOfARank(EagerDecodeBackend):
    """On several ranks a page's address is its number times a packed page, whatever the stride between blocks is."""

    def _entries(self, kv_cache, request, tile):
        ranks = self._decode_metadata.dcp_world_size
        return super()._entries(packed(kv_cache) if ranks > 1 else kv_cache, request, tile)


class _ScaleOfOneModel(EagerDecodeBackend):
    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self.scale = 1.59 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


@known_defect("layer-decodes-with-scale-of-one-model", killed_by="call_order")
class ScaleOfOneModel(EagerLayer):
    """Decodes have the softmax scale of one model, whatever scale the layer was given."""

    decode_backend = _ScaleOfOneModel


class _PackedForSeveralTokens(EagerDecodeBackend):
    def _entries(self, kv_cache, request, tile):
        several = int(self._decode_metadata.query_lens_cpu.max()) > 1
        return super()._entries(packed(kv_cache) if several else kv_cache, request, tile)


@known_defect("layer-several-tokens-assume-packed-pages", killed_by="layer_combinations")
class PackedForSeveralTokens(EagerLayer):
    """Decodes of several tokens read a buffer that layers share as if it were packed."""

    decode_backend = _PackedForSeveralTokens
