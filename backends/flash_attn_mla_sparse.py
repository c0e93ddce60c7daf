"""FLASH_ATTN_MLA_SPARSE: FLASH_ATTN_MLA's kernel over pages of one token, which lists name.

Each query token is a request whose block table is its list, as in ``FlashAttnMLASparseImpl`` of vLLM 0.33.0.
"""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.flash_attn_mla import FlashAttnMLAvLLM
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_ROPE = 64
_APART = "slots are renumbered where blocks lie whole entries apart, as in vLLM, and other caches are copied"


class FlashAttnMLASparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "FLASH_ATTN_MLA_SPARSE"
    libraries = FlashAttnMLAvLLM.libraries
    devices = packaged.HOPPER
    supported_latent_dims = [(512, 64), (512, 0)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "vllm torch",
        ("wants a list of pages without gaps and its length", "what lists name, packed on the device"),
        ("pages of one token follow each other", _APART),
        packaged.PARTS_BOTH,
        ("without a rope part: reads one all the same", "zeros in queries, as in vLLM"),
        packaged.COPIES,
        ("vLLM asks for no LSE", "declared unsupported"),
    )
    lacks = FlashAttnMLAvLLM.lacks

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (source,), (latent, rope) = sources, aligned(q).tensor_split([self.kv_lora_rank], dim=-1)
        blocks, page, width = source.cache.shape
        # Rows of a cache from its first to its last, and how many of them lie from block to block.
        whole = source.cache.stride(0) % width == 0 and source.cache.stride()[1:] == (width, 1)
        pages = aligned(source.cache if whole else source.cache.contiguous())
        apart = pages.stride(0) // width
        rows = pages.as_strided((blocks * apart - apart + page, 1, 1, width), (width, width, width, 1))
        slots = source.indices // page * apart + source.indices % page
        table, lengths = packed(slots, listed(source.indices, source.length))
        v, k = rows.tensor_split([self.kv_lora_rank], dim=-1)
        if not self.qk_rope_head_dim:
            rope, k = q.new_zeros(*q.shape[:2], _ROPE), v[..., :_ROPE]
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        queries = {"q": rope, "q_v": latent, "cu_seqlens_q": starts, "max_seqlen_q": 1}
        keys = {"k": k, "v": v, "block_table": table, "seqused_k": lengths, "max_seqlen_k": table.shape[1]}
        options = {"softmax_scale": self.scale, "causal": True, "fa_version": 3}
        return self.library.flash_attn_varlen_func(**queries, **keys, **options), None
