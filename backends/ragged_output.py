"""What the prefill adapters of libraries that return no LSE have in common: they serve new tokens alone."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.checks import check_operands, check_unquantised
from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.interface import MLAPrefillBackend, UnsupportedConfiguration
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.packaged import LibraryKernel


class RaggedOutputBackend(LibraryKernel, MLAPrefillBackend):
    """New tokens whose LSE nobody needs; rows that do not count are 0."""

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
            out[:rows] = self.outputs(q[:rows], k[:rows], v[:rows], batch, out.dtype, output_scale)
        return out

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse: a chunk's output is of no use without its LSE.

        Raises:
            UnsupportedConfiguration: always.
        """
        raise UnsupportedConfiguration(f"{self.get_name()}: context chunks not supported, for want of an LSE")

    @abstractmethod
    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, dtype: torch.dtype, output_scale: Tensor | None
    ) -> Tensor:
        """Call the library.

        Args:
            q: [T, N, P + R], the rows that count, at least one.
            k: [T, N, P + R].
            v: [T, N, V]; any strides.
            batch: lengths and mask.
            dtype: of the output.
            output_scale: float32 scalar tensor of an output in e4m3, where the kernel declares one.

        Returns:
            The output [T, N, V] of ``dtype``.
        """
