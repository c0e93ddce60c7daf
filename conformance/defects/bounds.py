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
from mla_conformance.defects.known import Defects, before

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
    if x.device.type != "cpu" or not count:
        return
    begin = x.untyped_storage().data_ptr() + first
    for address in (begin, begin + count - 1):
        page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
        if not _libc.mincore(page, ctypes.c_size_t(1), ctypes.byref(ctypes.c_ubyte())):
            yield address


def end(x: torch.Tensor) -> int:
    """Bytes of the storage of ``x``."""
    return x.untyped_storage().nbytes()


def an_element_behind(x: torch.Tensor | None) -> None:
    if x is not None:
        reads(x, end(x), x.element_size())


def a_vector_behind(x: torch.Tensor) -> None:
    reads(x, end(x), _VECTOR)


def _place(x: torch.Tensor) -> int:
    """Bytes of its storage that stand before ``x``."""
    return x.data_ptr() - x.untyped_storage().data_ptr()


def _page(x: torch.Tensor) -> int:
    """Bytes from one row or block to the next."""
    return x.stride(0) * x.element_size()


class _Prefill(EagerPrefillBackend, Defects, killed_by="memory_bounds"):
    prefill_reads_an_element_behind_q = before("batch", q=an_element_behind)
    """The last row of queries is loaded with one element more."""
    prefill_reads_a_vector_behind_k = before("batch", k=a_vector_behind)
    """The next vector of keys is loaded before the loop finds that there is none."""
    prefill_reads_a_tile_behind_v = before("batch", lambda v: reads(v, end(v), -len(v) % 64 * v[0].nbytes))
    """The last tile of values is loaded whole and masked afterwards."""
    prefill_reads_an_element_before_k = before("batch", lambda k: reads(k, -k.element_size(), k.element_size()))
    """The key before a request's first is loaded to be masked, also of the first request."""
    prefill_reads_a_start_behind_the_last = before(
        "batch", lambda self: an_element_behind(self._prefill_metadata.query_start_loc)
    )
    """The end of each request is read from the entry behind it, and one more than there is."""
    prefill_reads_a_chunk_behind_the_last = before(
        "batch", lambda self: an_element_behind(getattr(self._prefill_metadata.chunked_context, "cu_seq_lens", None))
    )
    """The lengths of the next chunk are prefetched, also behind the last one."""

    def prefill_writes_an_element_behind_out__before_run_prefill_new_tokens(self, out):
        """The last store of an output has one element too many, and puts back what it has read there."""
        if out is not None:
            writes(out, _place(out) + out.nbytes, out.element_size())

    def prefill_writes_a_vector_before_out__before_run_prefill_new_tokens(self, out):
        """Stores to an output begin a vector before it, with what it has read there."""
        if out is not None:
            writes(out, _place(out) - _VECTOR, _VECTOR)


class _Decode(EagerDecodeBackend, Defects, killed_by="memory_bounds"):
    decode_reads_a_page_behind_the_cache = before(
        "run_decode",
        lambda kv_cache: reads(kv_cache, end(kv_cache) + kv_cache.stride(0) * kv_cache.element_size() - 1, 1),
    )
    """The next page of a sequence is prefetched where no page follows."""
    decode_reads_a_vector_behind_the_cache = before("run_decode", kv_cache=a_vector_behind)
    """The last entry of the last page is loaded with one vector more."""
    decode_reads_a_column_behind_the_block_table = before(
        "run_decode", lambda self: an_element_behind(self._decode_metadata.block_table)
    )
    """The column behind a request's last is read, also in the last row."""
    decode_reads_a_length_behind_the_last = before(
        "run_decode", lambda self: an_element_behind(self._decode_metadata.seq_lens)
    )
    """A block of threads reads the length of a request that the batch does not have."""
    decode_reads_a_vector_behind_the_rope_queries = before("run_decode", q_pe=a_vector_behind)
    """Heads are loaded in vectors that reach past the last one's rope."""
    decode_writes_an_element_behind_the_cache = before(
        "run_decode", lambda kv_cache: writes(kv_cache, end(kv_cache), kv_cache.element_size())
    )
    """The element behind the cache is written with what stands there."""

    def decode_reads_a_page_before_the_cache__before_run_decode(self, kv_cache):
        """A block of -1 is loaded as if it were one, and what it gives is not used."""
        if (self._decode_metadata.block_table < 0).any():
            reads(kv_cache, -_page(kv_cache), 1)


class _Sparse(EagerSparseBackend, Defects, killed_by="memory_bounds"):
    sparse_reads_a_vector_behind_the_lists = before("attend", lambda sources: a_vector_behind(sources[0].indices))
    """The next vector of a list is loaded ahead, also behind the last one."""
    sparse_reads_a_sink_behind_the_last = before("attend", sink=an_element_behind)
    """Sinks are loaded for a tile of heads, of which there are fewer."""

    def sparse_reads_the_slot_before_the_first__before_attend(self, sources):
        """An index of -1 is loaded as a slot, and its score is masked."""
        if (sources[0].indices < 0).any():
            reads(sources[0].cache, -sources[0].cache.shape[-1] * sources[0].cache.element_size(), 1)


class _Indexer(EagerIndexerBackend, Defects, killed_by="memory_bounds"):
    indexer_reads_a_vector_behind_the_weights = before("logits", weights=a_vector_behind)
    """Weights are loaded in vectors, one more than there are."""
    indexer_reads_a_tile_behind_the_gathered_keys = before(
        "logits", lambda k: reads(k, end(k), _page(k)), when=lambda self: self._sparse_metadata.block_table is None
    )
    """The last tile of gathered keys is loaded whole."""


class _Layer(MLACommonImpl, Defects, killed_by="memory_bounds", part="impl_class"):
    layer_reads_a_vector_behind_the_rope_keys = before("forward", k_pe=a_vector_behind)
    """New rope keys are loaded in vectors, one more than there are."""
    layer_writes_a_vector_behind_the_cache = before(
        "forward", lambda kv_cache: writes(kv_cache, end(kv_cache), _VECTOR)
    )
    """The last entry is written with a vector more, of what stands there."""
