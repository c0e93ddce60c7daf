"""SGLANG_TRITON_CACHE: SGLang 0.5.23's Triton kernels that write and gather latent entries, ``sglang/kernels/ops``."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.sglang_triton import sglang_library
from mla_conformance.backends.steps import CacheKernel

_TILED, _NONE = "fp8_ds_mla", -1


def _gathers(config: Any) -> bool:
    return config.kv_cache_dtype == _TILED and config.call == "gather_latent"


class SGLangTritonCacheBackend(CacheKernel):
    name = "SGLANG_TRITON_CACHE"
    libraries = (
        sglang_library("kvcache.mla_buffer"),
        sglang_library("quantization.dsa_quant_k_cache"),
        sglang_library("attention.dsa.dequant_k_cache"),
    )
    devices = packaged.FROM_ADA  # where Triton converts to e4m3
    supported_dtypes = [torch.bfloat16]
    supported_calls = ["write_latent", "gather_latent"]
    supported_kv_cache_dtypes = ["auto", _TILED]
    supported_slot_dtypes = [torch.int64, torch.int32]
    supports_compression = False
    declaration = packaged.declared(
        "sglang triton",
        ("wants a row for each slot at one stride", "counts the rows between blocks as well"),
        ("gathers rows that are listed", "lists them by the block table"),
        ("on Hopper the launcher takes a kernel in CUDA for rows that it can", "launches the Triton one"),
        ("gathers tiles of codes as values alone", "as codes declared unsupported"),
        ("gathers 64 columns of rope behind tiles of codes, always", "entries without are unsupported"),
    )
    refused = (
        (lambda c, _: _gathers(c) and not c.dequantise, f"gathering {_TILED} as it is not supported"),
        (
            lambda c, _: c.kv_cache_dtype == _TILED and c.qk_rope_head_dim not in (0, 64),
            "{c.qk_rope_head_dim} columns of rope not supported",
        ),
        (lambda c, _: _gathers(c) and not c.qk_rope_head_dim, f"gathering {_TILED} without a rope part not supported"),
    )

    def write_latent(self, x: Any) -> None:
        rows, numbers, tokens = *addressed(x.kv_cache, x.slot_mapping), len(x.slot_mapping)
        parts = [x.kv_c[:tokens], x.k_pe[:tokens]]
        if self.kv_cache_dtype == _TILED:
            parts = [part.squeeze(1) for part in self.libraries[1].load().quantize_k_cache_separate(*parts)]
        strides, (latent, rope) = (each.stride(0) for each in (rows, *parts)), (part.shape[1] for part in parts)
        options = {"BLOCK": 1 << (latent + rope - 1).bit_length(), "DCP_RANK": 0, "DCP_WORLD_SIZE": 1}
        launch = self.library.set_mla_kv_buffer_kernel[(tokens, 1)]
        launch(rows, *parts, numbers, _NONE, *strides, latent, rope, **options)

    def gather_latent(self, x: Any) -> None:
        page, request = x.kv_cache.shape[1], x.request
        token = torch.arange(len(request), device=request.device) - (x.cu_seq_lens[:-1] - x.starts).long()[request]
        slots = x.block_table[request, token // page].long() * page + token % page
        rows, numbers = addressed(x.kv_cache, slots)
        gathered = x.workspace[: len(numbers)]
        if self.kv_cache_dtype == _TILED:
            values = self.libraries[2].load().dequantize_k_cache_paged_dsa(rows.view(torch.float8_e4m3fn), numbers)
            gathered.copy_(values.squeeze(1))
        else:
            parts = gathered.tensor_split([self.kv_lora_rank], dim=1)
            self.library.get_mla_kv_buffer_triton(rows, numbers, *parts)


# Without the codes, which are made of bfloat16 alone.
packaged.interpreted(SGLangTritonCacheBackend, supported_kv_cache_dtypes=["auto"])


def addressed(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, width], other layers' among them, and the rows of slots in int64, -1 of none."""
    blocks, page, width = cache.shape
    apart, rest = divmod(cache.stride(0), width)
    if rest:
        said = f"blocks that are {cache.stride(0)} elements apart, no whole number of entries of {width}, not supported"
        raise UnsupportedConfiguration(f"SGLANG_TRITON_CACHE: {said}")
    rows = cache.as_strided(((blocks - 1) * apart + page, width), (width, 1))
    return rows, torch.where(slots < 0, _NONE, slots // page * apart + slots % page).long()
