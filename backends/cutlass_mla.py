"""CUTLASS_MLA: the CUTLASS decode kernel for Blackwell that is compiled into vLLM, through its custom operators.

It always computes 128 heads. Its LSE is natural, [B, 128]; how it splits keys it decides itself.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import BLACKWELL, Devices

_LIBRARY = Library("vllm._custom_ops", "vllm", "pip install vllm")
_OPERATOR = "sm100_cutlass_mla_decode"
_HEADS, _PAGE, _AUTOMATIC = 128, 128, -1


class CutlassMLADecodeBackend(PagedDecodeBackend):
    """One query token a request, pages of 128 tokens."""

    name: ClassVar[str] = "CUTLASS_MLA"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [_PAGE]  # which vLLM gives it
    devices: ClassVar[Devices] = BLACKWELL
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "torch"),
        deviations=(
            Deviation("computes 128 heads", "queries are padded with zeros, output and LSE are sliced"),
            Deviation("LSE [T, N]", "transposed"),
            Deviation("LSE +inf in a row without keys", "-inf in the rows that the lengths say see no key"),
            Deviation("wants a packed block table", "is made contiguous"),
            Deviation("a cache must start at multiples of 16 bytes", "another is copied"),
            Deviation("reads an e4m3 cache only under queries in e4m3, and no scale", "declared unsupported"),
        ),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """vLLM imports without its compiled operators, and not every build has this one."""
        if hasattr(torch.ops._C, _OPERATOR):
            return []
        return [f"package vllm is installed, but its compiled operators lack {_OPERATOR}; its wheels for CUDA have it"]

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, tokens = self._decode_metadata, ql_nope.shape[0]
        q_nope, q_pe = (pad(x, (0, 0, 0, _HEADS - self.num_heads)).contiguous() for x in (ql_nope, q_pe))
        output = q_nope.new_empty(tokens, _HEADS, self.kv_lora_rank)
        lse = q_nope.new_empty(tokens, _HEADS, dtype=torch.float32)
        _LIBRARY.load().sm100_cutlass_mla_decode(
            output,
            lse,
            q_nope,
            q_pe,
            aligned(kv_cache),
            metadata.seq_lens,
            metadata.block_table.contiguous(),
            self._workspace(tokens, metadata.block_table),
            self.scale,
            _AUTOMATIC,
        )
        return output[:, : self.num_heads], lse[:, : self.num_heads].mT

    def _workspace(self, tokens: int, block_table: Tensor) -> Tensor:
        """[bytes] uint8 for the longest sequence that the block table has room for; 0 stands for this device."""
        size = _LIBRARY.load().sm100_cutlass_mla_get_workspace_size(
            block_table.shape[1] * _PAGE, tokens, 0, num_kv_splits=_AUTOMATIC
        )
        return torch.empty(max(1, size), dtype=torch.uint8, device=block_table.device)
