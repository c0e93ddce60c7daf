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
        takes_head_dims: whether such a pair is one of those that have a rule and no list.
    """

    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ()
    takes_head_dims: ClassVar[Any] = staticmethod(lambda qk, v: True)

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Whether they are among ``head_dims`` and keep the rule too."""
        pair = (dimensions.qk_head_dim, dimensions.v_head_dim)
        among = not cls.head_dims or pair in cls.head_dims
        return among and cls.takes_head_dims(*pair) and super().supports_mla_dimensions(dimensions)

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
        if return_softmax_lse and not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: LSE not supported")
        self._output_scale = output_scale
        output, lse = self._run(q, k, v, RaggedBatch.new_tokens(self._prefill_metadata), out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.returns_lse:
            raise UnsupportedConfiguration(f"{self.get_name()}: context chunks not supported, for want of an LSE")
        return self._run(q, k, v, RaggedBatch.context_chunk(self._prefill_metadata, chunk_idx), None)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> Any:
        """Call the library.

        Args:
            q: [T, N, P + R], the rows that count, at least one.
            k: [S, N, P + R], at least one row.
            v: [S, N, V]; any strides.
            batch: lengths and mask.
            out: [T, N, V] to be written if the library can; whoever calls copies what was returned elsewhere.

        Returns:
            (output [T, N, V], lse [N, T] float32, natural logarithm), or the output alone of a library that returns no
            LSE.
        """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        check_operands(self, q, k, v, batch.query_tokens, batch.key_tokens)
        rows, keys = batch.query_tokens, batch.key_tokens
        if rows and keys and q.shape[0] == rows:
            found = self.attend(q, k[:keys], v[:keys], batch, out)
            output, lse = found if self.returns_lse else (found, q.new_zeros(0))
            return (output if out is None else _stored(output, out)), lse
        shape, dtype = (q.shape[0], self.num_heads, self.v_head_dim), output_dtype(q.dtype)
        whole = (q.new_empty(shape, dtype=dtype) if out is None else out).zero_()
        whole_lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        if rows and keys:
            found = self.attend(q[:rows], k[:keys], v[:keys], batch, whole[:rows])
            _stored(found[0] if self.returns_lse else found, whole[:rows])
            if self.returns_lse:
                whole_lse[:, :rows] = found[1]
        return whole, whole_lse


def _stored(output: Tensor, out: Tensor) -> Tensor:
    """``out``, holding ``output``; copied unless the library wrote it there itself."""
    return out if output.data_ptr() == out.data_ptr() else out.copy_(output)
