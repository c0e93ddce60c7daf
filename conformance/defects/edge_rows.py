"""Wrong decodes where heads, query tokens, requests and lengths of certain sizes meet; each fact alone is served."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import SplitDecode
from mla_conformance.defects.known import known_defect

_TILE = 64


@known_defect("decode-last-tile-of-packed-rows-lost", killed_by="decode_multi_token")
class TailOfPackedRows(EagerDecodeBackend):
    """Several query tokens and their heads are packed into tiles of 64 rows; behind the first a partial one is lost."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        tokens, rows = output.shape[0], output.shape[0] * output.shape[1]
        if tokens > 1 and rows > _TILE:
            output = output.contiguous()
            output.flatten(0, 1)[rows // _TILE * _TILE :] = 0.0
        return output, lse


@known_defect("decode-last-head-tile-bound-by-first-token", killed_by="decode_combinations")
class BoundOfTheFirstToken(EagerDecodeBackend):
    """With several query tokens, a last partial tile of 16 heads gives all of them the bound of the first."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        whole = self.num_heads // 16 * 16
        tail = torch.arange(self.num_heads, device=visible.device).view(-1, 1, 1) >= max(16, whole)
        return torch.where(tail, visible[:1], visible)


@known_defect("decode-lse-rows-advance-by-a-power-of-two", killed_by="decode_lse")
class LseOfPaddedHeads(EagerDecodeBackend):
    """The LSE of heads between powers of two is written with rows of the next power, and read as packed."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        heads, tokens = lse.shape
        written = lse.new_zeros(tokens, 1 << (heads - 1).bit_length())
        written[:, :heads] = lse.mT
        return output, written.flatten()[: lse.numel()].view(tokens, heads).mT.contiguous()


@known_defect("decode-lse-index-in-two-bytes", killed_by="decode_lse")
class LseIndexInTwoBytes(EagerDecodeBackend):
    """Rows times heads of the LSE are counted in two bytes, and what lies beyond stays 0."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        lse.flatten()[65536:] = 0.0
        return output, lse


@known_defect("decode-workspace-of-64-partials", killed_by="decode")
class SixtyFourPartials(SplitDecode):
    """There is room for 64 partial results; what the splits of many requests have beyond is left out."""

    split = _TILE

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        self._request = request
        return super()._attend(q, request, seq_len, kv_cache, k_scale)

    def _combine(self, parts):
        return super()._combine(parts[: max(1, 64 - self._request * len(parts))])


@known_defect("decode-longest-of-many-loses-a-tile", killed_by="decode")
class LongestLosesATile(EagerDecodeBackend):
    """With more than eight requests, one of more than 1024 tokens is not read to its last tile."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        tiles = list(self._tiles(seq_len))
        if len(self._decode_metadata.seq_lens) > 8 and seq_len > 1024:
            tiles.pop()
        return self._over(tiles, q, request, seq_len, kv_cache, k_scale)


@known_defect("decode-empty-context-of-several-tokens-is-padding", killed_by="decode_multi_token")
class EmptyContextIsPadding(EagerDecodeBackend):
    """A request of several query tokens that has no context is taken for padding."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        padding = len(q) > 1 and seq_len == len(q) and self._decode_metadata.dcp_world_size == 1
        return super()._attend(q, request, 0 if padding else seq_len, kv_cache, k_scale)


@known_defect("decode-padded-batch-has-as-many-tokens-each", killed_by="decode_multi_token")
class UniformWherePadded(EagerDecodeBackend):
    """In a batch with rows of padding every request is taken to have as many query tokens as the first."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        metadata = self._decode_metadata
        if metadata.dcp_world_size == 1 and not bool(metadata.seq_lens.all()):
            state.weighted[:, int(metadata.query_lens_cpu[0]) :] = 0.0
        return state


@known_defect("decode-bound-by-declared-longest-query", killed_by="loose_maxima")
class BoundByDeclaredMaximum(EagerDecodeBackend):
    """The bound of several query tokens counts back from the declared maximum, which may exceed the true one."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        excess = self._decode_metadata.max_query_len - int(self._decode_metadata.query_lens_cpu.max())
        if queries == 1 or not excess:
            return visible
        return super()._visible(queries, request, seq_len, slice(tile.start + excess, tile.stop + excess))


@known_defect("decode-half-sum-of-scaled-weights-overflows", killed_by="decode_lse")
class HalfSumOverflows(EagerDecodeBackend):
    """In an fp16 model weights times 2^8 are added in fp16, which overflows for 256 keys of equal logits."""

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state, scores, v)
        overflows = (later.total * 256 > 65504) & (self._model_dtype is torch.float16)
        return later._replace(total=later.total.masked_fill(overflows, torch.inf))
