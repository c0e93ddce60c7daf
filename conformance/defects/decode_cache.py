"""Pages that are looked up wrongly, slots that no request owns, codes that are read as other numbers."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import packed, through_e8m0
from mla_conformance.defects.known import known_defect


@known_defect("triton-mla-spec-decode-block-table-oob", killed_by="decode_multi_token", related=("decode_lse",))
class TableRowOfTheToken(EagerDecodeBackend):
    """The table has a row for each request and is read at the number of the query token."""

    def _blocks(self, request, pages):
        metadata = self._decode_metadata
        row = min(int(metadata.query_start_loc[request]), metadata.block_table.shape[0] - 1)
        return super()._blocks(row, pages)


@known_defect("flashmla-draft-extend-metadata-layout-clash", killed_by="decode_multi_token", related=("decode_lse",))
class FlatTable(EagerDecodeBackend):
    """For several query tokens the table is taken for a flat list of the requests' pages, one after the other."""

    def _blocks(self, request, pages):
        metadata = self._decode_metadata
        if int(metadata.query_lens_cpu.max()) == 1:
            return super()._blocks(request, pages)
        before = -(-metadata.seq_lens[:request] // self._page)
        return metadata.block_table.flatten()[int(before.sum()) + pages].long()

    def _entries(self, kv_cache, request, tile):
        self._page = kv_cache.shape[1]
        return super()._entries(kv_cache, request, tile)


@known_defect("flashmla-kv-indices-loop-tokens-vs-pages", killed_by="paged_cache", related=("decode_multi_token",))
class SixtyFourPagesAStep(EagerDecodeBackend):
    """Page ids are copied 64 at a time, in as many steps as 4096 tokens fit into the sequence; others stay 0."""

    def _blocks(self, request, pages):
        copied = -(-int(self._decode_metadata.seq_lens[request]) // 4096) * 64
        return super()._blocks(request, pages).masked_fill(pages >= copied, 0)


@known_defect("mla-kernels-assume-packed-pages", killed_by="paged_cache")
class PackedPages(EagerDecodeBackend):
    """A page's address is its number times a packed page, whatever the stride between blocks is."""

    def _entries(self, kv_cache, request, tile):
        return super()._entries(packed(kv_cache), request, tile)


@known_defect("rocm-fp8-gluon-batch1-only", killed_by="kv_cache_fp8")
class OneRequestOfCodes(EagerDecodeBackend):
    """The kernel for codes knows one request: all requests of a batch read its pages."""

    def _blocks(self, request, pages):
        return super()._blocks(0 if self.kv_cache_dtype == "fp8" else request, pages)


_POISONED_TOO = ("decode", "decode_lse", "decode_multi_token")
"""The unused slots of every decode case are poisoned, so these fail with the capability that is about them."""


class _ReadsOn(EagerDecodeBackend):
    """Reads to the end of the last page, and does something wrong with what it finds there."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        unused = slice(seq_len, -(-seq_len // kv_cache.shape[1]) * kv_cache.shape[1])
        if unused.start == unused.stop:
            return state
        return self._tail(state, q, self._dequantise(self._entries(kv_cache, request, unused), k_scale).unsqueeze(1))


@known_defect("mla-last-page-nan-leak", killed_by="paged_cache", related=_POISONED_TOO)
class WeightedTail(_ReadsOn):
    """Values of the last page's unused slots are multiplied by weights of 0."""

    def _tail(self, state, q, keys):
        return state._replace(weighted=state.weighted + (0.0 * self._values(keys)).sum(dim=(0, 1)))


@known_defect("tma-overread-uninitialised-kv-tile", killed_by="paged_cache", related=_POISONED_TOO)
class AdditiveMask(_ReadsOn):
    """Scores of unused slots are masked by adding -inf, which leaves a NaN a NaN."""

    def _tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys) - torch.inf, torch.zeros_like(self._values(keys)))


@known_defect("paged-flex-missing-upper-bound-mask", killed_by="paged_cache", related=_POISONED_TOO)
class WholePages(_ReadsOn):
    """Nothing bounds the keys from above: whole pages are attended to."""

    def _tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys), self._values(keys))


@known_defect("aiter-oob-page-id-folds-to-slot0-nan", killed_by="paged_cache", related=_POISONED_TOO)
class TailInSlotZero(EagerDecodeBackend):
    """The rest of the last tile is read from slot 0 of the cache, with weights of 0."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        if seq_len % 64 == 0:
            return state
        slot = self._values(self._dequantise(kv_cache[:1, 0].contiguous(), k_scale).unsqueeze(1))
        return state._replace(weighted=state.weighted + (0.0 * slot).sum(dim=(0, 1)))


@known_defect("dense-mla-invalid-page-ids-cross-request", killed_by="paged_cache", related=("decode_multi_token",))
class DeadRequestsRead(EagerDecodeBackend):
    """Page ids are clamped into the cache, and a request that pads the batch reads a key there."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        self._last_block = kv_cache.shape[0] - 1
        dead = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return super()._attend(q, request, 1 if dead else seq_len, kv_cache, k_scale)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last_block)


@known_defect("cutlass-mla-claims-fp8-without-scales", killed_by="kv_cache_fp8")
class ScalesIgnored(EagerDecodeBackend):
    """Codes are read as values: the scale of the cache is not used."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, torch.ones_like(k_scale))


@known_defect("fp8-mla-k-scale-vs-v-scale-inconsistent", killed_by="kv_cache_fp8")
class ValuesByAnotherScale(EagerDecodeBackend):
    """A latent is a key by the key's scale and a value by the value's, which nobody has set: it is 1."""

    def _dequantise(self, rows, k_scale):
        self._descale = k_scale if self.kv_cache_dtype == "fp8" else 1.0
        return super()._dequantise(rows, k_scale)

    def _values(self, keys):
        return super()._values(keys) / self._descale


@known_defect("trtllm-mha-fp8-q-without-qscale", killed_by="kv_cache_fp8")
class QueriesWithoutScale(EagerDecodeBackend):
    """Beside a cache of codes the queries become codes themselves, without a scale."""

    def _scores(self, q, k):
        codes = q.float().clamp(-448, 448).to(torch.float8_e4m3fn) if self.kv_cache_dtype == "fp8" else q
        return super()._scores(codes, k)


@known_defect("fp8-compile-cache-folds-unit-scale", killed_by="call_order")
class FoldedScale(EagerDecodeBackend):
    """A kernel that was compiled while the scale was 1 has no multiplication, and its key does not say so."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        folded = self.__dict__.setdefault("compiled", {}).setdefault(ql_nope.shape, bool(k_scale == 1))
        return super().run_decode(ql_nope, q_pe, kv_cache, torch.ones_like(k_scale) if folded else k_scale)


@known_defect("fp8-ds-mla-float-scale-read-as-e8m0", killed_by="kv_cache_fp8_ds_mla")
class ScalesToPowersOfTwo(EagerDecodeBackend):
    """The float32 scales of a mixed entry pass through e8m0, which holds powers of two."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(through_e8m0(rows) if self.kv_cache_dtype == "fp8_ds_mla" else rows, k_scale)
