"""Right results, from kernels that touch memory beside their operands."""

import ctypes
import mmap
from functools import partial

import torch

from mla_conformance.backends import eager, eager_decode, eager_indexer, eager_sparse
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import gathered
from mla_conformance.defects.known import Defects, before

VECTOR = 16  # bytes that are loaded or stored at once
_libc = ctypes.CDLL(None)


def reads(x: torch.Tensor, first: int, count: int, and_writes: bool = False) -> None:
    """Read so many bytes from one of the storage of ``x`` on, which may lie before or behind it.

    Those are the first and the last, as far as this process has memory there: that of a GPU is not its. What is written
    is what stands there, so that nobody else is harmed.
    """
    begin = x.untyped_storage().data_ptr() + first
    for address in (begin, begin + count - 1) if x.device.type == "cpu" and count else ():
        page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
        if not _libc.mincore(page, ctypes.c_size_t(1), ctypes.byref(ctypes.c_ubyte())):
            byte = ctypes.c_ubyte.from_address(address)
            seen = byte.value
            if and_writes:
                byte.value = seen


writes = partial(reads, and_writes=True)


def end(x: torch.Tensor) -> int:
    """Bytes of the storage of ``x``."""
    return x.untyped_storage().nbytes()


def an_element_behind(x: torch.Tensor | None) -> None:
    if x is not None:
        reads(x, end(x), x.element_size())


def a_vector_behind(x: torch.Tensor) -> None:
    reads(x, end(x), VECTOR)


def _place(x: torch.Tensor) -> int:
    """Bytes of its storage that stand before ``x``."""
    return x.data_ptr() - x.untyped_storage().data_ptr()


def _row(x: torch.Tensor) -> int:
    """Bytes from one row or block to the next."""
    return x.stride(0) * x.element_size()


class _Prefill(eager.EagerPrefillBackend, Defects):
    prefill_reads_an_element_behind_q = before("batch", q=an_element_behind)
    prefill_reads_a_vector_behind_k = before("batch", k=a_vector_behind)
    prefill_reads_a_tile_behind_v = before("batch", lambda v: reads(v, end(v), -len(v) % 64 * v[0].nbytes))
    prefill_reads_an_element_before_k = before("batch", lambda k: reads(k, -k.element_size(), k.element_size()))
    prefill_reads_a_start_behind_the_last = before(
        "batch", lambda self: an_element_behind(self._prefill_metadata.query_start_loc)
    )
    prefill_reads_a_chunk_behind_the_last = before(
        "batch", lambda self: an_element_behind(getattr(self._prefill_metadata.chunked_context, "cu_seq_lens", None))
    )

    def prefill_writes_an_element_behind_out__before_run_prefill_new_tokens(self, out):
        if out is not None:
            writes(out, _place(out) + out.nbytes, out.element_size())

    def prefill_writes_a_vector_before_out__before_run_prefill_new_tokens(self, out):
        if out is not None:
            writes(out, _place(out) - VECTOR, VECTOR)


class _Decode(eager_decode.EagerDecodeBackend, Defects):
    decode_reads_a_page_behind_the_cache = before("run_decode", kv_cache=lambda x: reads(x, end(x) + _row(x) - 1, 1))
    decode_reads_a_vector_behind_the_cache = before("run_decode", kv_cache=a_vector_behind)
    decode_reads_a_column_behind_the_block_table = before(
        "run_decode", lambda self: an_element_behind(self._decode_metadata.block_table)
    )
    decode_reads_a_length_behind_the_last = before(
        "run_decode", lambda self: an_element_behind(self._decode_metadata.seq_lens)
    )
    decode_reads_a_vector_behind_the_rope_queries = before("run_decode", q_pe=a_vector_behind)
    decode_writes_an_element_behind_the_cache = before(
        "run_decode", lambda kv_cache: writes(kv_cache, end(kv_cache), kv_cache.element_size())
    )

    def decode_reads_a_page_before_the_cache__before_run_decode(self, kv_cache):
        if (self._decode_metadata.block_table < 0).any():
            reads(kv_cache, -_row(kv_cache), 1)


class _Sparse(eager_sparse.EagerSparseBackend, Defects):
    sparse_reads_a_vector_behind_the_lists = before("attend", lambda sources: a_vector_behind(sources[0].indices))
    sparse_reads_a_sink_behind_the_last = before("attend", sink=an_element_behind)

    def sparse_reads_the_slot_before_the_first__before_attend(self, sources):
        if (sources[0].indices < 0).any():
            reads(sources[0].cache, -sources[0].cache.shape[-1] * sources[0].cache.element_size(), 1)


class _Indexer(eager_indexer.EagerIndexerBackend, Defects):
    indexer_reads_a_vector_behind_the_weights = before("logits", weights=a_vector_behind)
    indexer_reads_a_tile_behind_the_gathered_keys = before("logits", lambda k: reads(k, end(k), _row(k)), when=gathered)


class _Layer(MLACommonImpl, Defects, part="impl_class"):
    layer_reads_a_vector_behind_the_rope_keys = before("forward", k_pe=a_vector_behind)
    layer_writes_a_vector_behind_the_cache = before("forward", lambda kv_cache: writes(kv_cache, end(kv_cache), VECTOR))
