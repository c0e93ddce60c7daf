"""FLASH_ATTN_MLA: FlashAttention-3 with a second pair of query and key, one class for each package that has the kernel.

The rope part is its query and key, the latent its second query and the value, both in pages: head dims (64, 512), for
which few builds of FA3 have instances. ``upstream`` is flash_attn_interface, whoever built it, ``sglang`` the package
sglang-kernel, ``vllm`` the fork inside vLLM. None of them has run under this suite yet.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import HOPPER, Devices

_BUILD = "build FlashAttention's folder hopper with paged KV and the head dims (64, 512)"
_NEEDED = {
    "PAGEDKV": "paged KV",
    "HDIM64": "head dim 64",
    "HDIMDIFF64": "the head dims (64, 512)",
    "SPLIT": "split keys",
    "VARLEN": "lengths",
}
"""What a build may leave out, by its flag, and this kernel is made of."""
_UPSTREAM = Library("flash_attn_interface", "flash-attn-3", _BUILD)
_SGLANG = Library("sgl_kernel.flash_attn", "sglang-kernel", "pip install sglang-kernel")
_VLLM = Library("vllm.vllm_flash_attn.flash_attn_interface", "vllm", "pip install vllm")
_DEVIATIONS = (
    Deviation("wants the latent and the rope part of the cache apart", "two views of the one cache, not copied"),
    Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied"),
)


class FlashAttnMLADecodeBackend(PagedDecodeBackend):
    """The family: whichever package is installed, upstream's build first."""

    name: ClassVar[str] = "FLASH_ATTN_MLA"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(16)]  # what vLLM asks of it
    devices: ClassVar[Devices] = HOPPER
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        pages = aligned(kv_cache).unsqueeze(2)
        latent, rope = pages[..., : self.kv_lora_rank], pages[..., self.kv_lora_rank :]
        output, lse, *_ = self._kernel(aligned(q_pe), aligned(ql_nope), rope, latent)
        return output, lse

    def _kernel(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        """Output [T, N, L] and LSE [N, T] of q [T, N, R], qv [T, N, L] and pages of one head."""
        raise NotImplementedError(f"FLASH_ATTN_MLA is a family of kernels: choose one of {', '.join(self.variants)}")

    def _with_kvcache(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        metadata = self._decode_metadata
        return self.library.flash_attn_with_kvcache(
            q,
            k,
            v,
            qv=qv,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=self.scale,
            causal=True,
            return_softmax_lse=True,
        )


class FlashAttnMLAUpstream(FlashAttnMLADecodeBackend, variant="upstream"):
    """FlashAttention's own package, built for this; no package index has such a build."""

    libraries: ClassVar[tuple[Library, ...]] = (_UPSTREAM,)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flash-attn-3", "tokenspeed-fa3", "torch"), deviations=_DEVIATIONS
    )

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """A build may be without float16."""
        return super().supports_dtype(dtype) and not (dtype == torch.float16 and _left_out("FP16"))

    @classmethod
    def lacks(cls) -> list[str]:
        """A build notes what it leaves out."""
        lacks = ", ".join(what for flag, what in _NEEDED.items() if _left_out(flag))
        return [f"flash_attn_interface is installed, but built without {lacks}; {_BUILD}"] if lacks else []

    def _kernel(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        return self._with_kvcache(q, qv, k, v)


def _left_out(flag: str) -> bool:
    """Whether the installed build notes that it was made without a feature; its flags have two spellings."""
    if find_spec("flash_attn_config") is None:
        return False
    flags: dict[str, bool] = import_module("flash_attn_config").CONFIG["build_flags"]
    return any(flags.get(f"{prefix}_DISABLE_{flag}", False) for prefix in ("FLASHATTENTION", "FLASH_ATTENTION"))


class FlashAttnMLASGLang(FlashAttnMLADecodeBackend, variant="sglang"):
    """The kernels of SGLang, whose function is upstream's with more arguments."""

    libraries: ClassVar[tuple[Library, ...]] = (_SGLANG,)
    declaration: ClassVar[Declaration] = Declaration(distributions=("sglang-kernel", "torch"), deviations=_DEVIATIONS)

    def _kernel(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        return self._with_kvcache(q, qv, k, v)


class FlashAttnMLAvLLM(FlashAttnMLADecodeBackend, variant="vllm"):
    """The fork inside vLLM."""

    libraries: ClassVar[tuple[Library, ...]] = (_VLLM,)
    declaration: ClassVar[Declaration] = Declaration(distributions=("vllm", "torch"), deviations=_DEVIATIONS)

    @classmethod
    def lacks(cls) -> list[str]:
        """A build of vLLM may have no kernels for this version of FlashAttention."""
        reason = _VLLM.load().fa_version_unsupported_reason(3)
        return [f"package vllm is installed, but has no FlashAttention 3: {reason}"] if reason else []

    def _kernel(self, q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> Any:
        metadata = self._decode_metadata
        return self.library.flash_attn_varlen_func(
            q,
            k,
            v,
            q_v=qv,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            return_softmax_lse=True,
            fa_version=3,
        )
