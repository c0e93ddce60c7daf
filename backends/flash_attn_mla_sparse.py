"""FLASH_ATTN_MLA_SPARSE: FLASH_ATTN_MLA's kernel over pages of one token, which lists name; vLLM's first on Hopper.

Each query token is a request whose block table is its list. Written for vLLM 0.33.0, as ``FlashAttnMLASparseImpl`` of
``vllm/v1/attention/backends/mla/flashattn_mla_sparse.py`` drives its fork of FlashAttention, for prefills and decodes.
"""

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.flash_attn_mla import FlashAttnMLAvLLM
from mla_conformance.backends.packaged import COPIES, PARTS_BOTH, UNIFORM_BATCH, LibraryKernel, declared
from mla_conformance.backends.platform import HOPPER
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_ROPE = 64


class FlashAttnMLASparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of any length, over a cache or over gathered keys, without an LSE, as vLLM has it."""

    name = "FLASH_ATTN_MLA_SPARSE"
    libraries = FlashAttnMLAvLLM.libraries
    devices = HOPPER
    supported_latent_dims = [(512, 64), (512, 0)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = UNIFORM_BATCH
    declaration = declared(
        "vllm torch",
        ("wants a list of pages without gaps and its length", "what lists name, packed on the device"),
        (
            "pages of one token follow each other",
            "slots are renumbered where blocks lie whole entries apart, as in vLLM, and other caches are copied",
        ),
        PARTS_BOTH,
        ("without a rope part: reads one all the same", "zeros in queries, as in vLLM"),
        COPIES,
        ("vLLM asks for no LSE", "declared unsupported"),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        return FlashAttnMLAvLLM.lacks()

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (source,), query = sources, aligned(q)
        blocks, page, width = source.cache.shape
        # Rows of a cache from its first to its last, and how many of them lie from block to block.
        whole = source.cache.stride(0) % width == 0 and source.cache.stride()[1:] == (width, 1)
        pages = aligned(source.cache if whole else source.cache.contiguous())
        apart = pages.stride(0) // width
        rows = pages.as_strided((blocks * apart - apart + page, 1, 1, width), (width, width, width, 1))
        named = listed(source.indices, source.length)
        table, lengths = packed(source.indices // page * apart + source.indices % page, named)
        ql_nope, latent = query[..., : self.kv_lora_rank], rows[..., : self.kv_lora_rank]
        q_pe, rope = query[..., self.kv_lora_rank :], rows[..., self.kv_lora_rank :]
        if not self.qk_rope_head_dim:
            q_pe, rope = q.new_zeros(*q.shape[:2], _ROPE), latent[..., :_ROPE]
        output = self.library.flash_attn_varlen_func(
            q=q_pe,
            k=rope,
            v=latent,
            q_v=ql_nope,
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            max_seqlen_k=table.shape[1],
            seqused_k=lengths,
            block_table=table,
            softmax_scale=self.scale,
            causal=True,
            fa_version=3,
        )
        return output, None
