"""Pages that are looked up wrongly: another row of the table, another stride, another count."""

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "triton-mla-spec-decode-block-table-oob",
    killed_by="decode_multi_token",
    sources=(
        "vllm-project/vllm#51848",
        "vllm-project/vllm#51065",
    ),
)
class TableRowOfTheToken(EagerDecodeBackend):
    """The table has a row for each request and is read at the number of the query token."""

    def _blocks(self, request, pages):
        metadata = self._decode_metadata
        row = min(int(metadata.query_start_loc[request]), metadata.block_table.shape[0] - 1)
        return super()._blocks(row, pages)


@known_defect(
    "flashmla-draft-extend-metadata-layout-clash",
    killed_by="decode_multi_token",
    sources=("sgl-project/sglang#28028",),
)
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


@known_defect(
    "flashmla-kv-indices-loop-tokens-vs-pages",
    killed_by="paged_cache",
    related=("decode_multi_token",),
    sources=("sgl-project/sglang#11985",),
)
class SixtyFourPagesAStep(EagerDecodeBackend):
    """Page ids are copied 64 at a time, in as many steps as 4096 tokens fit into the sequence; others stay 0."""

    def _blocks(self, request, pages):
        copied = -(-int(self._decode_metadata.seq_lens[request]) // 4096) * 64
        return super()._blocks(request, pages).masked_fill(pages >= copied, 0)


@known_defect(
    "mla-kernels-assume-packed-pages",
    killed_by="paged_cache",
    sources=(
        "vllm-project/vllm#45111",
        "ROCm/aiter#3498",
    ),
)
class PackedPages(EagerDecodeBackend):
    """A page's address is its number times a packed page, whatever the stride between blocks is."""

    def _entries(self, kv_cache, request, tile):
        _, page, width = kv_cache.shape
        packed = kv_cache.as_strided(kv_cache.shape, (page * width, width, 1), kv_cache.storage_offset())
        return super()._entries(packed, request, tile)


@known_defect(
    "rocm-fp8-gluon-batch1-only",
    killed_by="kv_cache_fp8",
    sources=("vllm-project/vllm#51011",),
)
class OneRequestOfCodes(EagerDecodeBackend):
    """The kernel for codes knows one request: all requests of a batch read its pages."""

    def _blocks(self, request, pages):
        return super()._blocks(0 if self.kv_cache_dtype == "fp8" else request, pages)
