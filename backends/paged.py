"""What the decode adapters of GPU libraries have in common: absorbed queries of a batch against one paged cache.

An adapter implements :meth:`PagedDecodeBackend.attend`; whatever its library needs converted, it converts there.
Nothing here decides by the lengths what to launch, so that a captured CUDA graph serves other lengths.
"""

from abc import abstractmethod

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.library import LibraryKernel


class PagedDecodeBackend(LibraryKernel, MLADecodeBackend):
    """Operands are checked and trimmed to the rows that count; a row without keys is set to 0 and -inf."""

    def run_decode(
        self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`MLADecodeBackend`."""
        metadata = self._decode_metadata
        rows = int(metadata.query_lens_cpu.sum())
        self._check(ql_nope, q_pe, kv_cache, rows)
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
    def attend(
        self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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

    def _nothing(self, ql_nope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of attention to no key."""
        lse = ql_nope.new_full((self.num_heads, ql_nope.shape[0]), -torch.inf, dtype=torch.float32)
        return ql_nope.new_zeros(ql_nope.shape), lse

    def _check(self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, rows: int) -> None:
        """Refuse operands that are not declared, or that contradict the metadata (SPEC 3.8)."""
        name, dims = self.get_name(), (self.kv_lora_rank, self.qk_rope_head_dim)
        if not self.supports_dtype(ql_nope.dtype) or q_pe.dtype != ql_nope.dtype:
            raise UnsupportedConfiguration(
                f"{name}: dtypes {ql_nope.dtype} and {q_pe.dtype} of the query not supported"
            )
        if self.kv_cache_dtype not in self.supported_kv_cache_dtypes:
            raise UnsupportedConfiguration(f"{name}: kv_cache_dtype {self.kv_cache_dtype} not supported")
        if self.supported_latent_dims and dims not in self.supported_latent_dims:
            raise UnsupportedConfiguration(f"{name}: latent dims (L, R) = {dims} not supported")
        cache_dtype = torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else ql_nope.dtype
        if kv_cache.dtype != cache_dtype or kv_cache.dim() != 3 or kv_cache.shape[2] != sum(dims):
            raise ValueError(
                f"kv_cache: expected [blocks, page, {sum(dims)}] of {cache_dtype}, "
                f"got {list(kv_cache.shape)} of {kv_cache.dtype}"
            )
        for what, tensor, width in (("ql_nope", ql_nope, dims[0]), ("q_pe", q_pe, dims[1])):
            if tensor.shape[1:] != (self.num_heads, width) or tensor.shape[0] < rows:
                raise ValueError(
                    f"{what}: expected at least {rows} tokens of [{self.num_heads}, {width}] by the metadata, "
                    f"got shape {list(tensor.shape)}"
                )


def _rows_without_keys(metadata: MLACommonDecodeMetadata, rows: int) -> torch.Tensor:
    """[T] bool, computed on the device from what stands there when it runs."""
    return (metadata.seq_lens == 0).repeat_interleave(metadata.query_start_loc.diff(), output_size=rows)
