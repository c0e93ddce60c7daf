"""Wrong decodes where pages, codes, ranks and query tokens of certain sizes meet; each fact alone is served."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import V32_SCALES, packed
from mla_conformance.defects.known import known_defect


def _has_several(kernel: EagerDecodeBackend) -> bool:
    """Whether a request of the batch has several query tokens."""
    return int(kernel._decode_metadata.query_lens_cpu.max()) > 1


@known_defect("decode-codes-unscaled-with-several-tokens", killed_by="kv_cache_fp8")
class UnscaledForSeveralTokens(EagerDecodeBackend):
    """The kernel for several query tokens does not get the scale of a cache of codes."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        scale = torch.ones_like(k_scale) if _has_several(self) else k_scale
        return super().run_decode(ql_nope, q_pe, kv_cache, scale)


@known_defect("decode-codes-bound-by-token-in-three-bits", killed_by="kv_cache_fp8")
class TokenInThreeBits(EagerDecodeBackend):
    """Beside codes the number of a query token has three bits, so that the ninth has the bound of the first."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        coded = self.kv_cache_dtype == "fp8"
        return visible[torch.arange(queries, device=visible.device) % 8] if coded else visible


@known_defect("decode-rope-of-codes-in-single-pages-unscaled", killed_by="kv_cache_fp8")
class RopeOfSinglePages(EagerDecodeBackend):
    """In pages of one token, the rope values of codes are taken without their scale."""

    def _entries(self, kv_cache, request, tile):
        self._single = kv_cache.shape[1] == 1
        return super()._entries(kv_cache, request, tile)

    def _dequantise(self, rows, k_scale):
        keys = super()._dequantise(rows, k_scale)
        if self._single and self.kv_cache_dtype == "fp8":
            keys[:, self.kv_lora_rank :] /= k_scale
        return keys


@known_defect("decode-mixed-entry-offset-in-two-bytes", killed_by="kv_cache_fp8_ds_mla")
class OffsetInTwoBytes(EagerDecodeBackend):
    """Where a mixed entry of 656 bytes begins in its page is kept in two bytes, too few for pages beyond 99 tokens."""

    def _entries(self, kv_cache, request, tile):
        if self.kv_cache_dtype != "fp8_ds_mla":
            return super()._entries(kv_cache, request, tile)
        tokens = torch.arange(tile.start, tile.stop, device=kv_cache.device)
        _, page, width = kv_cache.shape
        begins = tokens % page * width & 0xFFFF
        return kv_cache[self._blocks(request, tokens // page), begins // width]


@known_defect("decode-single-head-takes-first-scale-of-mixed-entries", killed_by="kv_cache_fp8_ds_mla")
class FirstScaleForOneHead(EagerDecodeBackend):
    """The kernel for one head reads all tiles of a mixed entry with the scale of the first."""

    def _dequantise(self, rows, k_scale):
        if self.num_heads == 1 and self.kv_cache_dtype == "fp8_ds_mla":
            rows = rows.clone()
            rows[:, V32_SCALES] = rows[:, 512:516].repeat(1, 4)
        return super()._dequantise(rows, k_scale)


@known_defect("decode-single-pages-assumed-packed", killed_by="decode_combinations")
class SinglePagesPacked(EagerDecodeBackend):
    """Pages of one token are taken to stand one behind the other, whatever the stride between blocks is."""

    def _entries(self, kv_cache, request, tile):
        return super()._entries(packed(kv_cache) if kv_cache.shape[1] == 1 else kv_cache, request, tile)


@known_defect("decode-slot-in-fifteen-bits", killed_by="paged_cache")
class SlotInFifteenBits(EagerDecodeBackend):
    """Page id times page size plus offset is a signed number of two bytes, too few for many large pages."""

    def _entries(self, kv_cache, request, tile):
        tokens = torch.arange(tile.start, tile.stop, device=kv_cache.device)
        page = kv_cache.shape[1]
        slots = self._blocks(request, tokens // page) * page + tokens % page & 0x7FFF
        return kv_cache.view(torch.uint8)[slots // page, slots % page].view(kv_cache.dtype)


@known_defect("decode-table-rows-as-wide-as-the-first", killed_by="decode")
class TableOfTheFirstRequest(EagerDecodeBackend):
    """Rows of the block table are found by the pages of the first request, not by those of the longest."""

    def _entries(self, kv_cache, request, tile):
        self._page = kv_cache.shape[1]
        return super()._entries(kv_cache, request, tile)

    def _blocks(self, request, pages):
        metadata = self._decode_metadata
        held = -(-metadata.seq_lens // self._page)
        stride = metadata.block_table.shape[1] - int(held.max() - held[0])
        return metadata.block_table.flatten()[request * stride + pages].long()


@known_defect("decode-full-last-page-fetches-the-next", killed_by="paged_cache")
class FetchesTheNextPage(EagerDecodeBackend):
    """Behind a last page that is full the next block of the table is fetched, whatever stands there."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        column, offset = divmod(seq_len, kv_cache.shape[1])
        row = self._decode_metadata.block_table[request]
        if seq_len and not offset and column < len(row) and not 0 <= int(row[column]) < len(kv_cache):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect("dcp-several-tokens-assume-interleave-of-one", killed_by="dcp")
class InterleaveOfOneToken(EagerDecodeBackend):
    """On several ranks, the bound of several query tokens takes tokens to be dealt out one by one."""

    def _positions(self, metadata, tile):
        local = torch.arange(tile.start, tile.stop, device=metadata.seq_lens.device)
        alone = local * metadata.dcp_world_size + metadata.dcp_rank
        return alone if _has_several(self) else super()._positions(metadata, tile)


@known_defect("dcp-rank-in-three-bits", killed_by="dcp")
class RankInThreeBits(EagerDecodeBackend):
    """The causal bound of several query tokens takes rank 8 for rank 0."""

    def _positions(self, metadata, tile):
        wrong = metadata.dcp_rank - metadata.dcp_rank % 8
        return super()._positions(metadata, tile) - wrong * metadata.cp_kv_cache_interleave_size
