"""What the prefill adapters of GPU libraries have in common: one ragged batch a call, one library behind it."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.interface import (
    MLAPrefillBackend,
    UnsupportedConfiguration,
    check_operands,
    check_unquantised,
)
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.operands import takes
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.reference.dimensions import MLADimensions


class RaggedPrefillBackend(LibraryKernel, MLAPrefillBackend):
    """Operands are checked, trimmed to the rows that count, and handed over in one call, unless no row counts."""

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

    @takes(MLAPrefillBackend.run_prefill_new_tokens)
    def run_prefill_new_tokens(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        check_unquantised(self, x.output_scale)
        if x.return_softmax_lse and not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: LSE not supported")
        self._output_scale = x.output_scale
        batch = self.taken(RaggedBatch.new_tokens(self._prefill_metadata), x.out)
        output, lse = self._run(x.q, x.k, x.v, batch, x.out)
        return (output, lse) if x.return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: context chunks not supported, for want of an LSE")
        return self._run(q, k, v, RaggedBatch.context_chunk(self._prefill_metadata, chunk_idx), None)

    def taken(self, batch: RaggedBatch, out: Tensor | None) -> RaggedBatch:
        """New tokens as the library takes them; refuses what only their output tells."""
        return batch

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> Any:
        """Call the library with the rows of q [T, N, P + R], k and v [S, N, V] that count, at least one of each.

        ``out`` is to be written if the library can: what is returned elsewhere is copied. Returns (output [T, N, V],
        lse [N, T] float32, natural logarithm), or of a library without an LSE the output alone.
        """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, keys = batch.query_tokens, batch.key_tokens
        check_operands(self, q, k, v, rows, keys)
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
