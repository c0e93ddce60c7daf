"""Kernels over a latent cache, and the names that configurations have for its dtype: some mean the same layout."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.kernel import HeadSizes, PagedKernel, accepts_block_size
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS, cache_dtype, entry_width
from mla_conformance.reference.entry_formats import TILED_FORMATS

_MEANING = {"fp8_e4m3": "fp8", "bfloat16": "auto"}


def layout_of(kv_cache_dtype: str) -> str:
    """The layout that a name stands for: ``fp8_e4m3`` is ``fp8``, ``bfloat16`` is ``auto`` under a bf16 model."""
    return _MEANING.get(kv_cache_dtype, kv_cache_dtype)


def contradiction(kv_cache_dtype: str | None, model_dtype: torch.dtype) -> str:
    """Why a model cannot have such a cache whatever the kernel; empty if it can."""
    if kv_cache_dtype == "bfloat16" and model_dtype != torch.bfloat16:
        return f"kv_cache_dtype bfloat16 expects a model of bfloat16, got {model_dtype}; use auto"
    return ""


@dataclass(eq=False, repr=False)
class LatentKernel(PagedKernel, HeadSizes):
    """Attention to the entries of a paged cache of latents; L ``kv_lora_rank``, R ``qk_rope_head_dim``."""

    kv_cache_dtype: str
    vllm_config: Any

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # layouts of the cache that the kernel reads
    # scales of an ``fp8_ds_mla`` cache that the kernel reads as they are
    supported_tile_scales: ClassVar[list[str]] = ["float32", "pow2"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = []  # pairs (L, R); empty means any
    returns_lse: ClassVar[bool] = True  # whether an LSE can be asked for; without it ranks cannot share the keys either
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER  # what may be captured in a CUDA graph

    @classmethod
    def _cache_reasons(cls, config: Any, extra: str | None = None) -> Iterator[str]:
        layout = layout_of(config.kv_cache_dtype)
        if layout not in cls.supported_kv_cache_dtypes:
            yield f"kv_cache_dtype {config.kv_cache_dtype} not supported"
        elif "fp8_ds_mla" in (layout, extra) and config.tile_scales not in cls.supported_tile_scales:
            read = ", ".join(cls.supported_tile_scales)
            yield f"fp8_ds_mla with {config.tile_scales} scales not supported (supported: {read})"
        if reason := contradiction(config.kv_cache_dtype, config.dtype):
            yield reason
        if not accepts_block_size(cls.get_supported_kernel_block_sizes(), config.block_size):
            yield f"block_size {config.block_size} not supported"

    @classmethod
    def _latent_reasons(cls, config: Any) -> Iterator[str]:
        dims = (config.kv_lora_rank, config.qk_rope_head_dim)
        if cls.supported_latent_dims and dims not in cls.supported_latent_dims:
            yield f"latent dims (L, R) = {dims} not supported (supported: {cls.supported_latent_dims})"

    def __post_init__(self) -> None:
        self.kv_cache_dtype = layout_of(self.kv_cache_dtype)


def check_cache(name: str, cache: Tensor, layout: str, backend: HeadSizes, dtype: torch.dtype) -> None:
    """Refuse a cache of another form than the layout's; reads no device memory."""
    dims = (backend.kv_lora_rank, backend.qk_rope_head_dim)
    width, stored = entry_width(layout, *dims), cache_dtype(layout, dtype)
    if cache.dim() == 3 and cache.shape[2] == width and cache.dtype == stored:
        return
    fitting = [name for name in CACHE_LAYOUTS if name not in TILED_FORMATS or dims in TILED_FORMATS[name].dims]
    others = [name for name in fitting if cache.dim() and entry_width(name, *dims) == cache.shape[-1]]
    hint = f"which is as wide as {' or '.join(others)}" if others else "which is as wide as no layout of such keys"
    expected, got = f"[blocks, page, {width}] of {stored} for {layout}", f"{list(cache.shape)} of {cache.dtype}"
    raise ValueError(f"{name}: expected {expected}, got {got}, {hint}")


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a 4-bit code mean; the highest is the sign."""
_MANTISSA_BITS = 23


def gather(cache: Tensor, slots: Tensor, layout: str) -> Tensor:
    """Entries [..., width] of a cache [blocks, page, width] by their slots [...], the parts of an entry joined."""
    page, data = cache.shape[1], cache.view(torch.uint8)
    if layout not in TILED_FORMATS:
        # As bytes, since float8 cannot be indexed everywhere.
        return data[slots // page, slots % page].view(cache.dtype)
    pages, start, parts = data.flatten(1), 0, []
    for width in TILED_FORMATS[layout].parts:
        part = pages[:, start : start + page * width].unflatten(1, (page, width))
        parts.append(part[slots // page, slots % page])
        start += page * width
    return torch.cat(parts, dim=-1)


def dequantise(rows: Tensor, layout: str, k_scale: Tensor, model_dtype: torch.dtype) -> Tensor:
    """Keys in float32 of entries [..., width]; of a tiled one all of its columns, zeros where a model has no rope."""
    if layout not in TILED_FORMATS:
        return rows.float() * k_scale if layout == "fp8" else rows.float()
    form = TILED_FORMATS[layout]  # tiles of codes, each with its scale, then plain values
    parts = dict(zip(form.order, (part.contiguous() for part in rows.split(form.sizes, dim=-1)), strict=True))
    tiles = _READ[form.codes](parts["codes"]).unflatten(-1, (form.tiles, form.tile))
    scaled = (tiles * _READ[form.scales](parts["scales"])[..., : form.tiles].unsqueeze(-1)).flatten(-2)
    if not form.plain:
        return scaled
    plain = parts["plain"].view(torch.float8_e4m3fn if form.plain_codes else model_dtype)
    return torch.cat((scaled, plain.float()), dim=-1)


def _e2m1(data: Tensor) -> Tensor:
    """Two codes of a byte, the lower four bits first."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor(_E2M1, device=data.device)[codes & 7]
    return torch.where(codes >= 8, -values, values)


_READ: Mapping[str, Callable[[Tensor], Tensor]] = {
    "e4m3": lambda data: data.view(torch.float8_e4m3fn).float(),
    "e2m1": _e2m1,
    "float32": lambda data: data.view(torch.float32),
    "ue8m0": lambda data: (data.int() << _MANTISSA_BITS).view(torch.float32),  # the exponent of a float32 number
}  # values or scales of the bytes that stand for them
