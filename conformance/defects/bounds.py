"""Right results, from kernels that touch memory beside their operands."""

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
from mla_conformance.defects.known import defects

_VECTOR = 16
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


@defects("memory_bounds")
class _Prefill(EagerPrefillBackend):
    def prefill_reads_an_element_behind_q__before_batch(self, q):
        """The last row of queries is loaded with one element more."""
        reads(q, end(q), q.element_size())

    def prefill_reads_a_vector_behind_k__before_batch(self, k):
        """The next vector of keys is loaded before the loop finds that there is none."""
        reads(k, end(k), _VECTOR)

    def prefill_reads_a_tile_behind_v__before_batch(self, v):
        """The last tile of values is loaded whole and masked afterwards."""
        rows = -len(v) % 64
        if rows:
            reads(v, end(v), rows * v[0].numel() * v.element_size())

    def prefill_reads_an_element_before_k__before_batch(self, k):
        """The key before a request's first is loaded to be masked, also of the first request."""
        reads(k, -k.element_size(), k.element_size())

    def prefill_reads_a_start_behind_the_last__before_batch(self):
        """The end of each request is read from the entry behind it, and one more than there is."""
        starts = self._prefill_metadata.query_start_loc
        reads(starts, end(starts), starts.element_size())

    def prefill_reads_a_chunk_behind_the_last__before_batch(self):
        """The lengths of the next chunk are prefetched, also behind the last one."""
        context = self._prefill_metadata.chunked_context
        if context is not None:
            reads(context.cu_seq_lens, end(context.cu_seq_lens), 4)

    def prefill_writes_an_element_behind_out__before_run_prefill_new_tokens(self, out):
        """The last store of an output has one element too many, and puts back what it has read there."""
        if out is not None:
            last = out.data_ptr() - out.untyped_storage().data_ptr() + out.nbytes
            writes(out, last, out.element_size())

    def prefill_writes_a_vector_before_out__before_run_prefill_new_tokens(self, out):
        """Stores to an output begin a vector before it, with what it has read there."""
        if out is not None:
            writes(out, out.data_ptr() - out.untyped_storage().data_ptr() - _VECTOR, _VECTOR)


@defects("memory_bounds")
class _Decode(EagerDecodeBackend):
    def decode_reads_a_page_behind_the_cache__before_run_decode(self, kv_cache):
        """The next page of a sequence is prefetched where no page follows."""
        page = kv_cache.stride(0) * kv_cache.element_size()
        reads(kv_cache, end(kv_cache) + page - 1, 1)

    def decode_reads_a_vector_behind_the_cache__before_run_decode(self, kv_cache):
        """The last entry of the last page is loaded with one vector more."""
        reads(kv_cache, end(kv_cache), _VECTOR)

    def decode_reads_a_page_before_the_cache__before_run_decode(self, kv_cache):
        """A block of -1 is loaded as if it were one, and what it gives is not used."""
        if (self._decode_metadata.block_table < 0).any():
            reads(kv_cache, -kv_cache.stride(0) * kv_cache.element_size(), 1)

    def decode_reads_a_column_behind_the_block_table__before_run_decode(self):
        """The column behind a request's last is read, also in the last row."""
        table = self._decode_metadata.block_table
        reads(table, end(table), table.element_size())

    def decode_reads_a_length_behind_the_last__before_run_decode(self):
        """A block of threads reads the length of a request that the batch does not have."""
        lengths = self._decode_metadata.seq_lens
        reads(lengths, end(lengths), 4)

    def decode_reads_a_vector_behind_the_rope_queries__before_run_decode(self, q_pe):
        """Heads are loaded in vectors that reach past the last one's rope."""
        reads(q_pe, end(q_pe), _VECTOR)

    def decode_writes_an_element_behind_the_cache__before_run_decode(self, kv_cache):
        """The element behind the cache is written with what stands there."""
        writes(kv_cache, end(kv_cache), kv_cache.element_size())


@defects("memory_bounds")
class _Sparse(EagerSparseBackend):
    def sparse_reads_a_vector_behind_the_lists__before_attend(self, sources):
        """The next vector of a list is loaded ahead, also behind the last one."""
        reads(sources[0].indices, end(sources[0].indices), _VECTOR)

    def sparse_reads_the_slot_before_the_first__before_attend(self, sources):
        """An index of -1 is loaded as a slot, and its score is masked."""
        if (sources[0].indices < 0).any():
            reads(sources[0].cache, -sources[0].cache.shape[-1] * sources[0].cache.element_size(), 1)

    def sparse_reads_a_sink_behind_the_last__before_attend(self, sink):
        """Sinks are loaded for a tile of heads, of which there are fewer."""
        if sink is not None:
            reads(sink, end(sink), sink.element_size())


@defects("memory_bounds")
class _Indexer(EagerIndexerBackend):
    def indexer_reads_a_vector_behind_the_weights__before_logits(self, weights):
        """Weights are loaded in vectors, one more than there are."""
        reads(weights, end(weights), _VECTOR)

    def indexer_reads_a_tile_behind_the_gathered_keys__before_logits(self, k):
        """The last tile of gathered keys is loaded whole."""
        if self._sparse_metadata.block_table is None:
            reads(k, end(k), k.stride(0) * k.element_size())


@defects("memory_bounds", inside=(EagerLayer, "impl_class"))
class _Layer(MLACommonImpl):
    def layer_reads_a_vector_behind_the_rope_keys__before_forward(self, k_pe):
        """New rope keys are loaded in vectors, one more than there are."""
        reads(k_pe, end(k_pe), _VECTOR)

    def layer_writes_a_vector_behind_the_cache__before_forward(self, kv_cache):
        """The last entry is written with a vector more, of what stands there."""
        writes(kv_cache, end(kv_cache), _VECTOR)
