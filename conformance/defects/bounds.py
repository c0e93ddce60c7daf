"""Right results, from kernels that touch memory beside their operands.

Where nothing is mapped there, as never happens in the pools of a GPU, an emulation touches nothing.
"""

import ctypes
import mmap
from collections.abc import Iterator

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.defects.known import known_defect

_VECTOR = 16
_TILE = 64
_libc = ctypes.CDLL(None)


def reads(x: torch.Tensor, first: int, count: int) -> None:
    """Read so many bytes from one of the storage of ``x`` on, which may lie before or behind it."""
    for address in _mapped(x, first, count):
        ctypes.string_at(address, 1)


def writes(x: torch.Tensor, first: int, count: int) -> None:
    """Write so many bytes; what stands there, so that nobody else is harmed."""
    for address in _mapped(x, first, count):
        byte = ctypes.c_ubyte.from_address(address)
        byte.value = byte.value


def _mapped(x: torch.Tensor, first: int, count: int) -> Iterator[int]:
    """The first and the last address of these, as far as this process has memory there: those of a GPU are not its."""
    if x.device.type != "cpu":
        return
    begin = x.untyped_storage().data_ptr() + first
    for address in (begin, begin + count - 1):
        page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
        if not _libc.mincore(page, ctypes.c_size_t(1), ctypes.byref(ctypes.c_ubyte())):
            yield address


def end(x: torch.Tensor) -> int:
    """Bytes of the storage of ``x``."""
    return x.untyped_storage().nbytes()


class _Prefill(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self._touch(q, k, v, out)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        self._touch(q, k, v, None)
        return super().run_prefill_context_chunk(chunk_idx, q, k, v)


@known_defect("prefill-reads-an-element-behind-q", killed_by="memory_bounds")
class ElementBehindQ(_Prefill):
    """The last row of queries is loaded with one element more."""

    def _touch(self, q, k, v, out):
        reads(q, end(q), q.element_size())


@known_defect("prefill-reads-a-vector-behind-k", killed_by="memory_bounds")
class VectorBehindK(_Prefill):
    """The next vector of keys is loaded before the loop finds that there is none."""

    def _touch(self, q, k, v, out):
        reads(k, end(k), _VECTOR)


@known_defect("prefill-reads-a-tile-behind-v", killed_by="memory_bounds")
class TileBehindV(_Prefill):
    """The last tile of values is loaded whole and masked afterwards."""

    def _touch(self, q, k, v, out):
        rows = -len(v) % _TILE
        if rows:
            reads(v, end(v), rows * v[0].numel() * v.element_size())


@known_defect("prefill-reads-an-element-before-k", killed_by="memory_bounds")
class ElementBeforeK(_Prefill):
    """The key before a request's first is loaded to be masked, also of the first request."""

    def _touch(self, q, k, v, out):
        reads(k, -k.element_size(), k.element_size())


@known_defect("prefill-reads-a-start-behind-the-last", killed_by="memory_bounds")
class StartBehindTheLast(_Prefill):
    """The end of each request is read from the entry behind it, and one more than there is."""

    def _touch(self, q, k, v, out):
        starts = self._prefill_metadata.query_start_loc
        reads(starts, end(starts), starts.element_size())


@known_defect("prefill-reads-a-chunk-behind-the-last", killed_by="memory_bounds")
class ChunkBehindTheLast(_Prefill):
    """The lengths of the next chunk are prefetched, also behind the last one."""

    def _touch(self, q, k, v, out):
        context = self._prefill_metadata.chunked_context
        if context is not None:
            reads(context.cu_seq_lens, end(context.cu_seq_lens), 4)


@known_defect("prefill-writes-an-element-behind-out", killed_by="memory_bounds")
class ElementBehindOut(_Prefill):
    """The last store of an output has one element too many, and puts back what it has read there."""

    def _touch(self, q, k, v, out):
        if out is not None:
            last = out.data_ptr() - out.untyped_storage().data_ptr() + out.nbytes
            writes(out, last, out.element_size())


@known_defect("prefill-writes-a-vector-before-out", killed_by="memory_bounds")
class VectorBeforeOut(_Prefill):
    """Stores to an output begin a vector before it, with what it has read there."""

    def _touch(self, q, k, v, out):
        if out is not None:
            writes(out, out.data_ptr() - out.untyped_storage().data_ptr() - _VECTOR, _VECTOR)


class _Decode(EagerDecodeBackend):
    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self._touch(ql_nope, q_pe, kv_cache, self._decode_metadata)
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


@known_defect("decode-reads-a-page-behind-the-cache", killed_by="memory_bounds")
class PageBehindTheCache(_Decode):
    """The next page of a sequence is prefetched where no page follows."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        page = kv_cache.stride(0) * kv_cache.element_size()
        reads(kv_cache, end(kv_cache) + page - 1, 1)


@known_defect("decode-reads-a-vector-behind-the-cache", killed_by="memory_bounds")
class VectorBehindTheCache(_Decode):
    """The last entry of the last page is loaded with one vector more."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        reads(kv_cache, end(kv_cache), _VECTOR)


@known_defect("decode-reads-a-page-before-the-cache", killed_by="memory_bounds")
class PageBeforeTheCache(_Decode):
    """A block of -1 is loaded as if it were one, and what it gives is not used."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        if (metadata.block_table < 0).any():
            reads(kv_cache, -kv_cache.stride(0) * kv_cache.element_size(), 1)


@known_defect("decode-reads-a-column-behind-the-block-table", killed_by="memory_bounds")
class ColumnBehindTheTable(_Decode):
    """The column behind a request's last is read, also in the last row."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        table = metadata.block_table
        reads(table, end(table), table.element_size())


@known_defect("decode-reads-a-length-behind-the-last", killed_by="memory_bounds")
class LengthBehindTheLast(_Decode):
    """A block of threads reads the length of a request that the batch does not have."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        reads(metadata.seq_lens, end(metadata.seq_lens), 4)


@known_defect("decode-reads-a-vector-behind-the-rope-queries", killed_by="memory_bounds")
class VectorBehindRopeQueries(_Decode):
    """Heads are loaded in vectors that reach past the last one's rope."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        reads(q_pe, end(q_pe), _VECTOR)


@known_defect("decode-writes-an-element-behind-the-cache", killed_by="memory_bounds")
class ElementBehindTheCache(_Decode):
    """The element behind the cache is written with what stands there."""

    def _touch(self, ql_nope, q_pe, kv_cache, metadata):
        writes(kv_cache, end(kv_cache), kv_cache.element_size())


class _Sparse(EagerSparseBackend):
    def attend(self, q, sources, k_scale, sink):
        self._touch(q, sources[0], sink)
        return super().attend(q, sources, k_scale, sink)


@known_defect("sparse-reads-a-vector-behind-the-lists", killed_by="memory_bounds")
class VectorBehindTheLists(_Sparse):
    """The next vector of a list is loaded ahead, also behind the last one."""

    def _touch(self, q, source, sink):
        reads(source.indices, end(source.indices), _VECTOR)


@known_defect("sparse-reads-the-slot-before-the-first", killed_by="memory_bounds")
class SlotBeforeTheFirst(_Sparse):
    """An index of -1 is loaded as a slot, and its score is masked."""

    def _touch(self, q, source, sink):
        if (source.indices < 0).any():
            reads(source.cache, -source.cache.shape[-1] * source.cache.element_size(), 1)


@known_defect("sparse-reads-a-sink-behind-the-last", killed_by="memory_bounds")
class SinkBehindTheLast(_Sparse):
    """Sinks are loaded for a tile of heads, of which there are fewer."""

    def _touch(self, q, source, sink):
        if sink is not None:
            reads(sink, end(sink), sink.element_size())


class _Indexer(EagerIndexerBackend):
    def _logits(self, q, weights, k, k_scale):
        self._touch(q, weights, k)
        return super()._logits(q, weights, k, k_scale)


@known_defect("indexer-reads-a-vector-behind-the-weights", killed_by="memory_bounds")
class VectorBehindTheWeights(_Indexer):
    """Weights are loaded in vectors, one more than there are."""

    def _touch(self, q, weights, k):
        reads(weights, end(weights), _VECTOR)


@known_defect("indexer-reads-a-tile-behind-the-gathered-keys", killed_by="memory_bounds")
class TileBehindGatheredKeys(_Indexer):
    """The last tile of gathered keys is loaded whole."""

    def _touch(self, q, weights, k):
        if self._sparse_metadata.block_table is None:
            reads(k, end(k), k.stride(0) * k.element_size())


@known_defect("layer-reads-a-vector-behind-the-rope-keys", killed_by="memory_bounds")
class VectorBehindRopeKeys(EagerLayer):
    """New rope keys are loaded in vectors, one more than there are."""

    class impl_class(MLACommonImpl):
        def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=None):
            reads(k_pe, end(k_pe), _VECTOR)
            return super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)


@known_defect("layer-writes-a-vector-behind-the-cache", killed_by="memory_bounds")
class VectorWrittenBehindTheCache(EagerLayer):
    """The last entry is written with a vector more, of what stands there."""

    class impl_class(MLACommonImpl):
        def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=None):
            writes(kv_cache, end(kv_cache), _VECTOR)
            return super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
