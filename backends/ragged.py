"""What the adapters of GPU libraries have in common: one ragged batch a call, one library behind it.

An adapter implements :meth:`RaggedPrefillBackend.attend`; whatever its library needs converted, it converts there.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.checks import check_operands, check_unquantised
from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.interface import MLAPrefillBackend, UnsupportedConfiguration
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.reference.dimensions import MLADimensions


class RaggedPrefillBackend(LibraryKernel, MLAPrefillBackend):
    """Operands are checked, trimmed to the rows that count, and handed to the library in one call.

    A call in which no query or no key counts is not launched: its output is 0 and its LSE -inf.

    Attributes:
        head_dims: pairs (q and k, v) that the kernels are made for; empty means any.
    """

    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ()

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Whether they are among ``head_dims`` too."""
        among = not cls.head_dims or (dimensions.qk_head_dim, dimensions.v_head_dim) in cls.head_dims
        return among and super().supports_mla_dimensions(dimensions)

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        """Take the metadata of the next calls; plans of earlier ones are void."""
        super().prepare_metadata(prefill_metadata)
        self._plans: dict[int | None, Any] = {}

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_unquantised(self, output_scale)
        output, lse = self._run(q, k, v, RaggedBatch.new_tokens(self._prefill_metadata), out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(q, k, v, RaggedBatch.context_chunk(self._prefill_metadata, chunk_idx), None)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Call the library.

        Args:
            q: [T, N, P + R], the rows that count, at least one.
            k: [S, N, P + R], at least one row.
            v: [S, N, V]; any strides.
            batch: lengths and mask.
            out: [T, N, V] to be written if the library can; whoever calls copies what was returned elsewhere.

        Returns:
            (output [T, N, V], lse [N, T] float32, natural logarithm).
        """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        check_operands(self, q, k, v, batch.query_tokens, batch.key_tokens)
        rows, keys = batch.query_tokens, batch.key_tokens
        if rows and keys and q.shape[0] == rows:
            output, lse = self.attend(q, k[:keys], v[:keys], batch, out)
            return (output if out is None else _stored(output, out)), lse
        shape, dtype = (q.shape[0], self.num_heads, self.v_head_dim), output_dtype(q.dtype)
        whole = (q.new_empty(shape, dtype=dtype) if out is None else out).zero_()
        whole_lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        if rows and keys:
            output, lse = self.attend(q[:rows], k[:keys], v[:keys], batch, whole[:rows])
            _stored(output, whole[:rows])
            whole_lse[:, :rows] = lse
        return whole, whole_lse


class RaggedOutputBackend(LibraryKernel, MLAPrefillBackend):
    """New tokens whose LSE nobody needs, of libraries that return none; rows that do not count are 0."""

    returns_lse: ClassVar[bool] = False

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor:
        """See :class:`MLAPrefillBackend`.

        Raises:
            UnsupportedConfiguration: the LSE is asked for, or a quantised output of a kernel that has none.
        """
        check_unquantised(self, output_scale)
        if return_softmax_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: LSE not supported")
        batch = RaggedBatch.new_tokens(self._prefill_metadata)
        rows = batch.query_tokens
        check_operands(self, q, k, v, rows, rows)
        if out is None:
            out = q.new_empty(q.shape[0], self.num_heads, self.v_head_dim, dtype=output_dtype(q.dtype))
        out[rows:] = 0
        if rows:
            out[:rows] = self.attend(q[:rows], k[:rows], v[:rows], batch, out.dtype, output_scale)
        return out

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse: a chunk's output is of no use without its LSE."""
        raise UnsupportedConfiguration(f"{self.get_name()}: context chunks not supported, for want of an LSE")

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, dtype: torch.dtype, scale: Tensor | None
    ) -> Tensor:
        """Call the library.

        Args:
            q: [T, N, P + R], the rows that count, at least one.
            k: [T, N, P + R].
            v: [T, N, V]; any strides.
            batch: lengths and mask.
            dtype: of the output.
            scale: float32 scalar tensor of an output in e4m3, where the kernel declares one.

        Returns:
            The output [T, N, V] of ``dtype``.
        """


def _stored(output: Tensor, out: Tensor) -> Tensor:
    """``out``, holding ``output``; copied unless the library wrote it there itself."""
    return out if output.data_ptr() == out.data_ptr() else out.copy_(output)
