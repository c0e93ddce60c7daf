"""SGLANG_TRITON_CACHE: SGLang's Triton kernels that write latent entries and gather them.

Written for SGLang 0.5.23, ``sglang/kernels/ops``: ``quantization/dsa_quant_k_cache.py``, ``kvcache/mla_buffer.py`` and
``attention/dsa/dequant_k_cache.py``. Importing a module imports the package.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.cache import MLACacheBackend
from mla_conformance.backends.cache_checks import check_gather, check_latents, check_workspace, require_call
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.interpreted import interpreted
from mla_conformance.backends.packaged import LibraryKernel, declared
from mla_conformance.backends.platform import FROM_ADA, DeviceCapability

_TILED, _NONE = "fp8_ds_mla", -1


def _library(module: str) -> Library:
    return Library(f"sglang.kernels.ops.{module}", "sglang", extra("sglang"))


class SGLangTritonCacheBackend(LibraryKernel, MLACacheBackend):
    """Caches of the model's dtype, and of tiles of e4m3 codes with float32 scales."""

    name = "SGLANG_TRITON_CACHE"
    libraries = (
        _library("kvcache.mla_buffer"),
        _library("quantization.dsa_quant_k_cache"),
        _library("attention.dsa.dequant_k_cache"),
    )
    devices = FROM_ADA  # where Triton converts to e4m3
    supported_dtypes = [torch.bfloat16]
    supported_calls = ["write_latent", "gather_latent"]
    supported_kv_cache_dtypes = ["auto", _TILED]
    supported_slot_dtypes = [torch.int64, torch.int32]
    supports_compression = False
    declaration = declared(
        "sglang triton",
        ("wants a row for each slot at one stride", "counts the rows between blocks as well"),
        ("has none for blocks that are no whole entries apart", "such a cache is copied, and back"),
        ("gathers rows that are listed", "lists them by the block table"),
        ("on Hopper the launcher takes a kernel in CUDA for rows that it can", "launches the Triton one"),
        ("gathers tiles of codes as values alone", "as codes declared unsupported"),
        ("gathers 64 columns of rope behind tiles of codes, always", "entries without are unsupported"),
    )

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        gathers, rope = config.call == "gather_latent", config.qk_rope_head_dim
        if config.kv_cache_dtype == _TILED:
            if gathers and not config.dequantise:
                yield f"gathering {_TILED} as it is not supported"
            if rope not in (0, 64):
                yield f"{rope} columns of rope not supported"
            if gathers and rope == 0:
                yield f"gathering {_TILED} without a rope part not supported"

    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        require_call(self, "write_latent", kv_cache, kv_c.dtype, slot_dtype=slot_mapping.dtype)
        check_latents(self, kv_c, k_pe, kv_cache, slot_mapping)
        if (whole := _whole(kv_cache)) is not kv_cache:
            self.run_write_latent(kv_c, k_pe, whole, slot_mapping, k_scale)
            kv_cache.copy_(whole)
            return
        tokens = len(slot_mapping)
        parts = [kv_c[:tokens], k_pe[:tokens]]
        if self.kv_cache_dtype == _TILED:
            parts = [part.squeeze(1) for part in self.libraries[1].load().quantize_k_cache_separate(*parts)]
        rows, numbers = _rows(kv_cache), _numbers(slot_mapping, kv_cache)
        strides, (latent, rope) = (x.stride(0) for x in (rows, *parts)), (part.shape[1] for part in parts)
        ranks = {"DCP_RANK": 0, "DCP_WORLD_SIZE": 1}
        self.library.set_mla_kv_buffer_kernel[(tokens, 1)](
            rows, *parts, numbers, _NONE, *strides, latent, rope, BLOCK=1 << (latent + rope - 1).bit_length(), **ranks
        )

    def run_gather_latent(
        self,
        kv_cache: Tensor,
        workspace: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        seq_starts: Tensor,
        k_scale: Tensor,
        compress_ratio: int = 1,
    ) -> None:
        asked = {"dequantise": workspace.dtype != kv_cache.dtype, "compress_ratio": compress_ratio}
        require_call(self, "gather_latent", kv_cache, workspace.dtype, **asked)
        check_workspace(self, kv_cache, workspace)
        check_gather(kv_cache, block_table, cu_seq_lens, seq_starts, compress_ratio, workspace=workspace)
        kv_cache = _whole(kv_cache)
        page, lengths = kv_cache.shape[1], cu_seq_lens.diff()
        request = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        token = torch.arange(len(request), device=lengths.device) - (cu_seq_lens[:-1] - seq_starts).long()[request]
        numbers = _numbers(block_table[request, token // page].long() * page + token % page, kv_cache)
        gathered, rows = workspace[: len(numbers)], _rows(kv_cache)
        if self.kv_cache_dtype == _TILED:
            values = self.libraries[2].load().dequantize_k_cache_paged_dsa(rows.view(torch.float8_e4m3fn), numbers)
            gathered.copy_(values.squeeze(1))
        else:
            parts = gathered.tensor_split([self.kv_lora_rank], dim=1)
            self.library.get_mla_kv_buffer_triton(rows, numbers, *parts)


# Without the codes, which are made of bfloat16 alone.
SGLangTritonCacheInterpreted = interpreted(SGLangTritonCacheBackend, supported_kv_cache_dtypes=["auto"])


def _whole(cache: Tensor) -> Tensor:
    """The cache, or a copy where its blocks are no whole entries apart."""
    return cache.contiguous() if cache.stride(0) % cache.shape[2] else cache


def _rows(cache: Tensor) -> Tensor:
    """[rows, width], of which a block begins every so many; of several layers' blocks the others are among them."""
    blocks, page, width = cache.shape
    return cache.as_strided(((blocks - 1) * cache.stride(0) // width + page, width), (width, 1))


def _numbers(slots: Tensor, cache: Tensor) -> Tensor:
    """The rows of slots, int64; -1 of none."""
    page, apart = cache.shape[1], cache.stride(0) // cache.shape[2]
    return torch.where(slots < 0, _NONE, slots // page * apart + slots % page).long()
