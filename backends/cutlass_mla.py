"""CUTLASS_MLA: the CUTLASS decode kernel for Blackwell that is compiled into vLLM, through its custom operators.

It always computes 128 heads. Its LSE is natural, [B, 128]; how it splits keys it decides itself.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.packaged import LSE_INFINITE, LSE_TOKENS_FIRST, ONE_TOKEN_EACH, PACKS_TABLE, declared
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import BLACKWELL

_OPERATOR = "sm100_cutlass_mla_decode"
_HEADS, _PAGE, _AUTOMATIC = 128, 128, -1


class CutlassMLADecodeBackend(PagedDecodeBackend):
    """One query token a request, pages of 128 tokens."""

    name = "CUTLASS_MLA"
    libraries = (Library("vllm._custom_ops", "vllm", "pip install vllm"),)
    devices = BLACKWELL
    supported_block_sizes = [_PAGE]  # which vLLM gives it
    supported_latent_dims = [(512, 64)]
    cudagraph_support = ONE_TOKEN_EACH
    declaration = declared(
        "vllm torch",
        ("computes 128 heads", "queries are padded with zeros, output and LSE are sliced"),
        LSE_TOKENS_FIRST,
        LSE_INFINITE,
        PACKS_TABLE,
        ("a cache must start at multiples of 16 bytes", "another is copied"),
        ("reads an e4m3 cache only under queries in e4m3, and no scale", "declared unsupported"),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """VLLM imports without its compiled operators, and not every build has this one."""
        if hasattr(torch.ops._C, _OPERATOR):
            return []
        return [f"package vllm is installed, but its compiled operators lack {_OPERATOR}; its wheels for CUDA have it"]

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, tokens, table = self._decode_metadata, ql_nope.shape[0], self._decode_metadata.block_table
        query = [pad(x, (0, 0, 0, _HEADS - self.num_heads)).contiguous() for x in (ql_nope, q_pe)]
        output = query[0].new_empty(tokens, _HEADS, self.kv_lora_rank)
        lse = output.new_empty(tokens, _HEADS, dtype=torch.float32)
        # For the longest sequence that the block table has room for; 0 stands for this device.
        room = (table.shape[1] * _PAGE, tokens, 0)
        size = self.library.sm100_cutlass_mla_get_workspace_size(*room, num_kv_splits=_AUTOMATIC)
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=table.device)
        batch = (metadata.seq_lens, table.contiguous(), workspace, self.scale, _AUTOMATIC)
        self.library.sm100_cutlass_mla_decode(output, lse, *query, aligned(kv_cache), *batch)
        return output[:, : self.num_heads], lse[:, : self.num_heads].mT
