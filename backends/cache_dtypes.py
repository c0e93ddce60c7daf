"""Names that configurations have for the dtype of a latent cache: some mean the same layout."""

import torch

_MEANING = {"fp8_e4m3": "fp8", "bfloat16": "auto"}


def layout_of(kv_cache_dtype: str) -> str:
    """The layout that a name stands for: ``fp8_e4m3`` is ``fp8``, ``bfloat16`` is ``auto`` under a bf16 model."""
    return _MEANING.get(kv_cache_dtype, kv_cache_dtype)


def contradiction(kv_cache_dtype: str | None, model_dtype: torch.dtype) -> str:
    """Why a model cannot have such a cache whatever the kernel; empty if it can."""
    if kv_cache_dtype == "bfloat16" and model_dtype != torch.bfloat16:
        return f"kv_cache_dtype bfloat16 expects a model of bfloat16, got {model_dtype}; use auto"
    return ""
