"""FLASH_ATTN_MLA: FlashAttention-3 with a second pair of query and key, one class for each package that has the kernel.

The rope part is query and key, the latent second query and value. None has run under this suite yet.
FLASH_ATTN_MLA_SPARSE is the same over pages of one token, which lists name.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.library_roles import PagedDecodeBackend
from mla_conformance.backends.packaged import Library
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_BUILD = "build FlashAttention's folder hopper with paged KV and the head dims (64, 512)"
_NEEDED = {"PAGEDKV": "paged KV", "HDIM64": "head dim 64", "HDIMDIFF64": "the head dims (64, 512)"}
_NEEDED |= {"SPLIT": "split keys", "VARLEN": "lengths"}
"""What a build may leave out, by its flag, and this kernel is made of."""
_DEVIATIONS = (packaged.PARTS_CACHE, packaged.COPIES)


class FlashAttnMLADecodeBackend(PagedDecodeBackend):
    """The family: whichever package is installed, upstream's build first."""

    name = "FLASH_ATTN_MLA"
    devices = packaged.HOPPER
    by_device = {0: ("upstream", "sglang", "vllm")}
    supported_block_sizes = [packaged.MultipleOf(16)]  # what vLLM asks of it
    supported_query_len = None
    supports_nonuniform_queries = True
    cudagraph_support = packaged.UNIFORM_BATCH

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        x, pages = self._decode_metadata, aligned(kv_cache).unsqueeze(2)
        latent, rope = pages[..., : self.kv_lora_rank], pages[..., self.kv_lora_rank :]
        batch = {"cu_seqlens_q": x.query_start_loc, "max_seqlen_q": x.max_query_len, "causal": True}
        options = {"softmax_scale": self.scale, "return_softmax_lse": True}
        output, lse, *_ = self.call(aligned(q_pe), rope, latent, aligned(ql_nope), **batch, **options)
        return output, lse

    def call(self, q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> Any:
        lengths, table = self._decode_metadata.seq_lens, self._decode_metadata.block_table
        call = self.library.flash_attn_with_kvcache
        return call(q, k, v, qv=qv, cache_seqlens=lengths, page_table=table, **options)


class FlashAttnMLAUpstream(FlashAttnMLADecodeBackend, variant="upstream"):
    libraries = (Library("flash_attn_interface", "flash-attn-3", _BUILD),)
    declaration = packaged.declared("flash-attn-3 tokenspeed-fa3 torch", *_DEVIATIONS)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return super().supports_dtype(dtype) and not (dtype == torch.float16 and cls.left_out("FP16"))

    @classmethod
    def lacks(cls) -> str:
        lacks = ", ".join(what for flag, what in _NEEDED.items() if cls.left_out(flag))
        return f"flash_attn_interface is installed, but built without {lacks}; {_BUILD}" if lacks else ""

    @staticmethod
    def left_out(flag: str) -> bool:
        """Whether the installed build notes that it was made without a feature; its flags have two spellings."""
        if find_spec("flash_attn_config") is None:
            return False
        flags: dict[str, bool] = import_module("flash_attn_config").CONFIG["build_flags"]
        return any(flags.get(f"{prefix}_DISABLE_{flag}", False) for prefix in ("FLASHATTENTION", "FLASH_ATTENTION"))


FlashAttnMLADecodeBackend.also(
    "sglang",
    libraries=(Library("sgl_kernel.flash_attn", "sglang-kernel", "pip install sglang-kernel"),),
    declaration=packaged.declared("sglang-kernel torch", *_DEVIATIONS),
)


class FlashAttnMLAvLLM(FlashAttnMLADecodeBackend, variant="vllm"):
    libraries = (Library("vllm.vllm_flash_attn.flash_attn_interface", "vllm", "pip install vllm"),)
    declaration = packaged.declared("vllm torch", *_DEVIATIONS)

    @classmethod
    def lacks(cls) -> str:
        reason = cls.libraries[0].load().fa_version_unsupported_reason(3)
        return f"package vllm is installed, but has no FlashAttention 3: {reason}" if reason else ""

    def call(self, q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> Any:
        x, version = self._decode_metadata, {"fa_version": 3}
        keys = {"seqused_k": x.seq_lens, "block_table": x.block_table, "max_seqlen_k": x.max_seq_len}
        return self.library.flash_attn_varlen_func(q, k, v, q_v=qv, **keys, **options, **version)


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
