"""FLASH_ATTN_MLA: FlashAttention-3 with a second pair of query and key, one class for each package that has the kernel.

The rope part is its query and key, the latent its second query and the value, both in pages: head dims (64, 512), for
which few builds of FA3 have instances. ``upstream`` is flash_attn_interface, whoever built it, ``sglang`` the package
sglang-kernel, ``vllm`` the fork inside vLLM. None of them has run under this suite yet.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.packaged import COPIES, PARTS_CACHE, UNIFORM_BATCH, declared
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import HOPPER

_BUILD = "build FlashAttention's folder hopper with paged KV and the head dims (64, 512)"
_NEEDED = {
    "PAGEDKV": "paged KV",
    "HDIM64": "head dim 64",
    "HDIMDIFF64": "the head dims (64, 512)",
    "SPLIT": "split keys",
    "VARLEN": "lengths",
}
"""What a build may leave out, by its flag, and this kernel is made of."""


class FlashAttnMLADecodeBackend(PagedDecodeBackend):
    """The family: whichever package is installed, upstream's build first."""

    name = "FLASH_ATTN_MLA"
    devices = HOPPER
    by_device = {0: ("upstream", "sglang", "vllm")}
    supported_block_sizes = [MultipleOf(16)]  # what vLLM asks of it
    supported_latent_dims = [(512, 64)]
    supported_query_len = None
    supports_nonuniform_queries = True
    cudagraph_support = UNIFORM_BATCH

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        pages = aligned(kv_cache).unsqueeze(2)
        latent, rope = pages[..., : self.kv_lora_rank], pages[..., self.kv_lora_rank :]
        output, lse, *_ = self.call(aligned(q_pe), aligned(ql_nope), rope, latent)
        return output, lse

    def call(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        """Output [T, N, L] and LSE [N, T] of q [T, N, R], qv [T, N, L] and pages of one head."""
        if not self.variant:
            raise self.not_a_family()
        metadata = self._decode_metadata
        batch: dict[str, Any] = {"cache_seqlens": metadata.seq_lens, "page_table": metadata.block_table}
        batch |= {"cu_seqlens_q": metadata.query_start_loc, "max_seqlen_q": metadata.max_query_len}
        options = {"softmax_scale": self.scale, "causal": True, "return_softmax_lse": True}
        return self.library.flash_attn_with_kvcache(q, k, v, qv=qv, **batch, **options)


class FlashAttnMLAUpstream(FlashAttnMLADecodeBackend, variant="upstream"):
    """FlashAttention's own package, built for this; no package index has such a build."""

    libraries = (Library("flash_attn_interface", "flash-attn-3", _BUILD),)
    declaration = declared("flash-attn-3 tokenspeed-fa3 torch", PARTS_CACHE, COPIES)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """A build may be without float16."""
        return super().supports_dtype(dtype) and not (dtype == torch.float16 and cls.left_out("FP16"))

    @classmethod
    def lacks(cls) -> list[str]:
        """A build notes what it leaves out."""
        lacks = ", ".join(what for flag, what in _NEEDED.items() if cls.left_out(flag))
        return [f"flash_attn_interface is installed, but built without {lacks}; {_BUILD}"] if lacks else []

    @staticmethod
    def left_out(flag: str) -> bool:
        """Whether the installed build notes that it was made without a feature; its flags have two spellings."""
        if find_spec("flash_attn_config") is None:
            return False
        flags: dict[str, bool] = import_module("flash_attn_config").CONFIG["build_flags"]
        return any(flags.get(f"{prefix}_DISABLE_{flag}", False) for prefix in ("FLASHATTENTION", "FLASH_ATTENTION"))


class FlashAttnMLASGLang(FlashAttnMLADecodeBackend, variant="sglang"):
    """The kernels of SGLang, whose function is upstream's with more arguments."""

    libraries = (Library("sgl_kernel.flash_attn", "sglang-kernel", "pip install sglang-kernel"),)
    declaration = declared("sglang-kernel torch", PARTS_CACHE, COPIES)


class FlashAttnMLAvLLM(FlashAttnMLADecodeBackend, variant="vllm"):
    """The fork inside vLLM."""

    libraries = (Library("vllm.vllm_flash_attn.flash_attn_interface", "vllm", "pip install vllm"),)
    declaration = declared("vllm torch", PARTS_CACHE, COPIES)

    @classmethod
    def lacks(cls) -> list[str]:
        """A build of vLLM may have no kernels for this version of FlashAttention."""
        reason = cls.libraries[0].load().fa_version_unsupported_reason(3)
        return [f"package vllm is installed, but has no FlashAttention 3: {reason}"] if reason else []

    def call(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        metadata = self._decode_metadata
        batch: dict[str, Any] = {"q_v": qv, "seqused_k": metadata.seq_lens, "block_table": metadata.block_table}
        batch |= {"cu_seqlens_q": metadata.query_start_loc, "max_seqlen_q": metadata.max_query_len}
        options = {"softmax_scale": self.scale, "causal": True, "return_softmax_lse": True, "fa_version": 3}
        return self.library.flash_attn_varlen_func(q, k, v, **batch, max_seqlen_k=metadata.max_seq_len, **options)
