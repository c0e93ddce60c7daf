"""CUTLASS_MLA: the CUTLASS decode kernel for Blackwell that is compiled into vLLM; its LSE is natural, [B, 128]."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.paged import PagedDecodeBackend

_OPERATOR = "sm100_cutlass_mla_decode"
_HEADS, _PAGE, _AUTOMATIC = 128, 128, -1


class CutlassMLADecodeBackend(PagedDecodeBackend):
    name = "CUTLASS_MLA"
    libraries = (packaged.Library("vllm._custom_ops", "vllm", "pip install vllm"),)
    devices = packaged.BLACKWELL
    supported_block_sizes = [_PAGE]  # which vLLM gives it
    cudagraph_support = packaged.ONE_TOKEN_EACH
    declaration = packaged.declared(
        "vllm torch",
        ("computes 128 heads", "queries are padded with zeros, output and LSE are sliced"),
        packaged.LSE_TOKENS_FIRST,
        packaged.LSE_INFINITE,
        packaged.PACKS_TABLE,
        ("a cache must start at multiples of 16 bytes", "another is copied"),
        ("reads an e4m3 cache only under queries in e4m3, and no scale", "declared unsupported"),
    )

    @classmethod
    def lacks(cls) -> str:
        said = f"package vllm is installed, but its compiled operators lack {_OPERATOR}; its wheels for CUDA have it"
        return "" if hasattr(torch.ops._C, _OPERATOR) else said

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        table, tokens = self._decode_metadata.block_table, len(ql_nope)
        query = [pad(x, (0, 0, 0, _HEADS - self.num_heads)).contiguous() for x in (ql_nope, q_pe)]
        output = query[0].new_empty(tokens, _HEADS, self.kv_lora_rank)
        lse = output.new_empty(tokens, _HEADS, dtype=torch.float32)
        # For the longest sequence that the block table has room for; 0 stands for this device.
        room = (table.shape[1] * _PAGE, tokens, 0)
        size = self.library.sm100_cutlass_mla_get_workspace_size(*room, num_kv_splits=_AUTOMATIC)
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=table.device)
        batch = (self._decode_metadata.seq_lens, table.contiguous(), workspace, self.scale, _AUTOMATIC)
        self.library.sm100_cutlass_mla_decode(output, lse, *query, aligned(kv_cache), *batch)
        return output[:, : self.num_heads], lse[:, : self.num_heads].mT
