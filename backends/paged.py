"""What the decode adapters of GPU libraries have in common: absorbed queries of a batch against one paged cache.

An adapter implements :meth:`PagedDecodeBackend.attend`; whatever its library needs converted, it converts there.
Nothing here decides by the lengths what to launch, so that a captured CUDA graph serves other lengths.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.checks import check_decode_operands
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, output_of
from mla_conformance.backends.packaged import LibraryKernel


class PagedDecodeBackend(LibraryKernel, MLADecodeBackend):
    """Operands are checked and trimmed to the rows that count; a row without keys is set to 0 and -inf."""

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`MLADecodeBackend`."""
        metadata = self._decode_metadata
        rows = int(metadata.query_lens_cpu.sum())
        check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        if not rows:
            return self._nothing(ql_nope)
        output, lse = self.attend(ql_nope[:rows], q_pe[:rows], kv_cache, k_scale)
        keyless = _rows_without_keys(metadata, rows)
        output.masked_fill_(keyless[:, None, None], 0.0)
        lse = lse.masked_fill(keyless, -torch.inf)
        if rows == ql_nope.shape[0]:
            return output, lse
        whole, whole_lse = self._nothing(ql_nope)
        whole[:rows], whole_lse[:, :rows] = output, lse
        return whole, whole_lse

    @abstractmethod
    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Call the library.

        Args:
            ql_nope: [T, N, L], the rows that count, at least one; any strides.
            q_pe: [T, N, R]; any strides.
            kv_cache: [blocks, page, L + R]; the blocks may be apart.
            k_scale: float32 scalar tensor.

        Returns:
            (output [T, N, L], which the caller may write to, lse [N, T] float32, natural logarithm); anything in rows
            without keys.
        """

    def _nothing(self, ql_nope: Tensor) -> tuple[Tensor, Tensor]:
        """The result of attention to no key."""
        lse = ql_nope.new_full((self.num_heads, ql_nope.shape[0]), -torch.inf, dtype=torch.float32)
        return ql_nope.new_zeros(ql_nope.shape), lse


class PagedOutputBackend(PagedDecodeBackend):
    """As :class:`PagedDecodeBackend`, of libraries that return no LSE."""

    returns_lse: ClassVar[bool] = False

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        """See :class:`MLADecodeBackend`; the output alone."""
        return output_of(super().run_decode(ql_nope, q_pe, kv_cache, k_scale))

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`; the LSE is dropped."""
        output = self.outputs(ql_nope, q_pe, kv_cache, k_scale)
        return output, output.new_full((self.num_heads, len(output)), torch.nan, dtype=torch.float32)

    @abstractmethod
    def outputs(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        """Call the library; arguments as of :meth:`PagedDecodeBackend.attend`, which returns the output alone."""


def _rows_without_keys(metadata: MLACommonDecodeMetadata, rows: int) -> Tensor:
    """[T] bool, computed on the device from what stands there when it runs."""
    return (metadata.seq_lens == 0).repeat_interleave(metadata.query_start_loc.diff(), output_size=rows)
