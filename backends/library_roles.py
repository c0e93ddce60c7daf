"""What adapters of libraries have in common, role by role: calls are checked and trimmed, one library stands behind."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import cache, conversions, decode, indexer, interface, operands, packaged, topk, tree
from mla_conformance.backends.graph_support import may_look_at
from mla_conformance.backends.kernel import UnsupportedConfiguration, output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.reference.dimensions import MLADimensions


class RaggedPrefillBackend(packaged.LibraryKernel, interface.MLAPrefillBackend):
    """One ragged batch a call, trimmed to the rows that count; no call where no row counts."""

    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ()  # pairs (q and k, v) that there are kernels for; empty: any
    takes_head_dims: ClassVar[Any] = staticmethod(lambda qk, v: True)  # or the rule of those that have one and no list
    # what the library leaves undefined in rows without keys, so that it is set to 0 and -inf: "output", "lse"
    blanks: ClassVar[tuple[str, ...]] = ()
    _output_scale: Tensor | None = None  # of the last call for new tokens

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        pair = (dimensions.qk_head_dim, dimensions.v_head_dim)
        among = not cls.head_dims or pair in cls.head_dims
        return among and cls.takes_head_dims(*pair) and super().supports_mla_dimensions(dimensions)

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        super().prepare_metadata(prefill_metadata)
        self._plans: dict[int | None, Any] = {}

    @operands.takes(interface.MLAPrefillBackend.run_prefill_new_tokens)
    def run_prefill_new_tokens(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        interface.check_unquantised(self, x.output_scale)
        if x.return_softmax_lse and not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: LSE not supported")
        self._output_scale = x.output_scale
        batch = self.taken(conversions.RaggedBatch.of(self._prefill_metadata), x.out)
        output, lse = self._run(x.q, x.k, x.v, batch, x.out)
        return (output, lse) if x.return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: context chunks not supported, for want of an LSE")
        return self._run(q, k, v, conversions.RaggedBatch.of(self._prefill_metadata, chunk_idx), None)

    def taken(self, batch: conversions.RaggedBatch, out: Tensor | None) -> conversions.RaggedBatch:
        """New tokens as the library takes them; refuses what only their output tells."""
        return batch

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: conversions.RaggedBatch, out: Tensor | None) -> Any:
        """Call the library with the rows of q [T, N, P + R], k and v [S, N, V] that count, at least one of each.

        ``out`` is to be written if the library can: what is returned elsewhere is copied. Returns (output [T, N, V],
        lse [N, T] float32, natural logarithm), or of a library without an LSE the output alone.
        """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, batch: conversions.RaggedBatch, out: Tensor | None) -> Any:
        rows, keys = batch.query_tokens, batch.key_tokens
        interface.check_operands(self, q, k, v, rows, keys)
        whole, lse = out, q.new_zeros(0)
        if not (rows and keys and len(q) == rows):  # some rows are not the library's to write
            shape, dtype = (len(q), self.num_heads, self.v_head_dim), output_dtype(q.dtype)
            whole = (q.new_empty(shape, dtype=dtype) if out is None else out).zero_()
            lse = q.new_full((self.num_heads, len(q)), -torch.inf, dtype=torch.float32)
            if not (rows and keys):
                return whole, lse
        counted = None if whole is None else whole[:rows]
        found = self.attend(q[:rows], k[:keys], v[:keys], batch, counted)
        output, found_lse = found if self.returns_lse else (found, lse)
        if self.blanks and (keyless := batch.rows_without_keys()) is not None:
            output = output.masked_fill_(keyless[:, None, None], 0.0) if "output" in self.blanks else output
            found_lse = found_lse.masked_fill(keyless, -torch.inf) if "lse" in self.blanks else found_lse
        if counted is not None and output.data_ptr() != counted.data_ptr():  # unless the library wrote it there itself
            counted.copy_(output)
        if len(q) == rows:
            return (output if whole is None else whole), found_lse
        assert whole is not None
        if self.returns_lse:
            lse[:, :rows] = found_lse
        return whole, lse


class PagedLatentDecode(packaged.LibraryKernel, decode.LatentDecode):
    """Operands are trimmed to the rows that count; a row without keys is set to 0 and -inf.

    A captured CUDA graph serves other lengths: nothing in it is decided by those of the batch that it was captured for.
    """

    supported_latent_dims = [(512, 64)]  # unless an adapter says otherwise

    def _run(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        metadata = self._decode_metadata
        self._check(self, metadata, ql_nope, q_pe, kv_cache)
        rows, lse = int(metadata.query_lens_cpu.sum()), None
        if rows:
            found = self.attend(ql_nope[:rows], q_pe[:rows], kv_cache, k_scale)
            output, lse = found if self.returns_lse else (found, None)
            if not may_look_at(output) or not metadata.seq_lens_cpu.all():
                # On the device, from what stands there when it runs.
                keyless = (metadata.seq_lens == 0).repeat_interleave(metadata.query_start_loc.diff(), output_size=rows)
                output.masked_fill_(keyless[:, None, None], 0.0)
                lse = None if lse is None else lse.masked_fill(keyless, -torch.inf)
        if rows < len(ql_nope) or not rows:
            whole = ql_nope.new_zeros(ql_nope.shape)
            whole_lse = ql_nope.new_full((self.num_heads, len(whole)), -torch.inf, dtype=torch.float32)
            if rows:
                whole[:rows] = output
            if lse is not None:
                whole_lse[:, :rows] = lse
            output, lse = whole, whole_lse
        return (output, lse) if self.returns_lse else output

    @abstractmethod
    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        """Call the library with the rows of ql_nope [T, N, L] and q_pe [T, N, R] that count, at least one.

        Returns (output [T, N, L], which the caller may write to, lse [N, T] float32, natural), or of a library without
        LSE the output alone; anything in rows without keys.
        """

    @property
    def latent_dims(self) -> dict[str, int]:
        return {"kv_lora_rank": self.kv_lora_rank, "qk_rope_head_dim": self.qk_rope_head_dim}


class PagedDecodeBackend(PagedLatentDecode, decode.MLADecodeBackend):
    run_decode = PagedLatentDecode._run


class PagedTreeBackend(PagedLatentDecode, tree.MLATreeBackend):
    run_tree_decode = PagedLatentDecode._run


class IndexerKernel(packaged.LibraryKernel, indexer.MLAIndexerBackend):
    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        indexer.check_index_call(self, (q, weights, k, k_scale), "logits")
        return self.score(q, weights, k, k_scale)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        indexer.check_index_call(self, (q, weights, k, k_scale), "topk", topk_tokens)
        return self.choose(self.score(q, weights, k, k_scale), topk_tokens)

    @abstractmethod
    def score(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None) -> Tensor:
        """What ``run_index_logits`` returns."""

    def choose(self, logits: Tensor, topk_tokens: int) -> Tensor:
        raise AssertionError("not declared, so refused before")


class TopKKernel(packaged.LibraryKernel, topk.MLATopKBackend):
    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        topk.check_topk_call(self, self._topk_metadata, logits, topk_tokens)
        return self.select(logits, self._topk_metadata.lengths, topk_tokens)

    @abstractmethod
    def select(self, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
        """What ``run_top_k_per_row`` returns, for rows of lengths [T]."""


class CacheKernel(packaged.LibraryKernel, cache.MLACacheBackend):
    """What is written and gathered: ``write_latent(x)`` and so on find in ``x`` what the call was given, by its name.

    A call without slots writes nothing. A gather finds besides ``starts``, the first entry of each request, ``lengths``
    [B] and ``request`` [S], that of each row.
    """

    # of those that ``supported_calls`` names
    write_latent: Any
    write_index: Any
    gather_latent: Any
    gather_index: Any

    @operands.takes(cache.MLACacheBackend.run_write_latent)
    def run_write_latent(self, x: Any) -> None:
        if self._is_written("write_latent", x, kv_c=x.kv_c, k_pe=x.k_pe):
            self.write_latent(x)

    @operands.takes(cache.MLACacheBackend.run_write_index)
    def run_write_index(self, x: Any) -> None:
        if self._is_written("write_index", x, k=x.k):
            self.write_index(x)

    @operands.takes(cache.MLACacheBackend.run_gather_latent)
    def run_gather_latent(self, x: Any) -> None:
        as_stored = x.workspace.dtype == x.kv_cache.dtype
        dtype = torch.bfloat16 if as_stored and self.kv_cache_dtype != "auto" else x.workspace.dtype
        asked = {"dequantise": not as_stored, "compress_ratio": x.compress_ratio}
        cache.require_call(self, "gather_latent", x.kv_cache, dtype, **asked)
        cache.check_workspace(self, x.kv_cache, x.workspace)
        self.gather_latent(self._looked_up(x, workspace=x.workspace))

    @operands.takes(cache.MLACacheBackend.run_gather_index)
    def run_gather_index(self, x: Any) -> None:
        cache.require_call(self, "gather_index", x.kv_cache, torch.bfloat16, compress_ratio=x.compress_ratio)
        cache.check_forms(self, "gather_index", torch.bfloat16, kv_cache=x.kv_cache, k=x.k, k_scale=x.k_scale)
        self.gather_index(self._looked_up(x, k=x.k, k_scale=x.k_scale))

    def _is_written(self, call: str, x: Any, **rows: Tensor) -> bool:
        cache.require_call(self, call, x.kv_cache, next(iter(rows.values())).dtype, slot_dtype=x.slot_mapping.dtype)
        cache.check_written(self, call, x.kv_cache, x.slot_mapping, **rows)
        return len(x.slot_mapping) > 0

    def _looked_up(self, x: Any, **workspaces: Tensor) -> Any:
        cache.check_gather(x, **workspaces)
        x.starts, x.lengths = x.seq_starts // x.compress_ratio, x.cu_seq_lens.diff()
        numbers = torch.arange(len(x.lengths), dtype=torch.int32, device=x.lengths.device)
        x.request = numbers.repeat_interleave(x.lengths)
        return x
