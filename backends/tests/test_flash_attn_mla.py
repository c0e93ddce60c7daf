"""The variants against stand-ins behind each package's signature, and what a build may lack."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.flash_attn_mla import FlashAttnMLADecodeBackend

_VARIANTS: Any = FlashAttnMLADecodeBackend.variants
_WITH_CACHE = "flash_attn_with_kvcache"
_PACKAGES = {
    "upstream": ("flash-attn-3 3.0.0+0251105a", "flash_attn_interface.py", _WITH_CACHE, "flash_attn_interface"),
    "sglang": ("sglang-kernel 0.4.10", "sgl_kernel/flash_attn.py", _WITH_CACHE, "sgl_kernel.flash_attn"),
    "vllm": (
        "vllm 0.33.0",
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        "flash_attn_varlen_func",
        "vllm.vllm_flash_attn.flash_attn_interface",
    ),
}
_NAMES = {
    "upstream": ("k_cache", "v_cache", "qv", "cache_seqlens", "page_table"),
    "vllm": ("k", "v", "q_v", "seqused_k", "block_table"),
}


def _library(mla_kernel: Any, variant: str) -> Any:
    """Rope and latent apart, of one tensor; bottom-right; natural LSE [N, T]."""

    def call(a: Any) -> Any:
        k, v, qv, lengths, table = (a[name] for name in _NAMES.get(variant, _NAMES["upstream"]))
        assert (k.shape[2:], v.shape[2:], qv.shape[-1]) == ((1, 64), (1, 512), 512)
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert a["causal"] and a["return_softmax_lse"] and a["max_seqlen_q"] == int(a["cu_seqlens_q"].diff().max())
        assert variant != "vllm" or (a["fa_version"], a["max_seqlen_k"]) == (3, int(lengths.max()))
        lengths = lengths.tolist()
        pages = torch.cat([v, k], dim=-1)[:, :, 0]
        queries = a["cu_seqlens_q"].diff().tolist()
        output, lse = mla_kernel(torch.cat([qv, a["q"]], dim=-1), pages, lengths, queries, table, a["softmax_scale"])
        return output, lse

    return call


@pytest.mark.parametrize("variant", _PACKAGES)
def test_conventions(variant: Any, recorded: Any, installed: Any, mla_kernel: Any, decodes: Any) -> None:
    label, file, function, module = _PACKAGES[variant]
    installed(module, **{function: recorded(label, f"{file}:{function}", _library(mla_kernel, variant))})
    decodes(_VARIANTS[variant], 16, (1, 1, 1), (65, 0, 130))
    decodes(_VARIANTS[variant], 64, (4, 1, 3), (65, 17, 4))


def _built(installed: Any, **flags: bool) -> list[str]:
    installed("flash_attn_interface")
    installed("flash_attn_config", CONFIG={"build_flags": flags}, __spec__="found")
    reasons: list[str] = _VARIANTS["upstream"].broken_dependencies()
    return reasons


def test_a_build_of_fa3_without_this_kernel_says_so(installed: Any) -> None:
    """As tokenspeed-fa3 spells it, and as fa3-fwd does."""
    (reason,) = _built(installed, FLASHATTENTION_DISABLE_PAGEDKV=False, FLASH_ATTENTION_DISABLE_HDIMDIFF64=True)
    assert "built without the head dims (64, 512); build FlashAttention's folder hopper" in reason
    (reason,) = _built(installed, FLASHATTENTION_DISABLE_PAGEDKV=True, FLASHATTENTION_DISABLE_FP8=True)
    assert "built without paged KV;" in reason
    assert _built(installed, FLASHATTENTION_DISABLE_BACKWARD=True) == []


def test_vllm_without_fa3_says_why(installed: Any) -> None:
    installed(_PACKAGES["vllm"][3], fa_version_unsupported_reason=lambda version: f"no extension {version}")
    assert _VARIANTS["vllm"].broken_dependencies() == [
        "package vllm is installed, but has no FlashAttention 3: no extension 3"
    ]
