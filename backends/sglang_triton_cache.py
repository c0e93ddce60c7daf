"""SGLANG_TRITON_CACHE: SGLang's Triton kernels that write latent entries and gather them.

Written for SGLang 0.5.23, ``sglang/kernels/ops``: ``quantization/dsa_quant_k_cache.py``, ``kvcache/mla_buffer.py`` and
``attention/dsa/dequant_k_cache.py``. Importing a module imports the package.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from mla_conformance.backends.cache import MLACacheBackend, MLACacheSelectorConfig
from mla_conformance.backends.cache_checks import check_cache, check_gather, check_slots, check_workspace, expect
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.interpreted import InterpretedKernel, interpreted_declaration, interpreted_libraries
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import DeviceCapability, get_device_capability

_TILED = "fp8_ds_mla"
_NONE = -1


def _library(module: str) -> Library:
    return Library(f"sglang.kernels.ops.{module}", "sglang", extra("sglang"))


class SGLangTritonCacheBackend(LibraryKernel, MLACacheBackend):
    """Caches of the model's dtype, and of tiles of e4m3 codes with float32 scales."""

    libraries: ClassVar[tuple[Library, ...]] = (
        _library("kvcache.mla_buffer"),
        _library("quantization.dsa_quant_k_cache"),
        _library("attention.dsa.dequant_k_cache"),
    )
    needed_capability: ClassVar[str] = "8.9 or newer"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_calls: ClassVar[list[str]] = ["write_latent", "gather_latent"]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", _TILED]
    supported_slot_dtypes: ClassVar[list[torch.dtype]] = [torch.int64, torch.int32]
    supports_compression: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("sglang", "triton"),
        deviations=(
            Deviation("wants a row for each slot at one stride", "counts the rows between blocks as well"),
            Deviation("gathers rows that are listed", "lists them by the block table"),
            Deviation("on Hopper the launcher takes a kernel in CUDA for rows that it can", "launches the Triton one"),
            Deviation("gathers tiles of codes as values alone", "as codes declared unsupported"),
        ),
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "SGLANG_TRITON_CACHE"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Where Triton converts to e4m3."""
        return device_capability is not None and device_capability >= (8, 9)

    @classmethod
    def _reasons(cls, config: MLACacheSelectorConfig) -> Iterator[str]:
        yield from super()._reasons(config)
        if config.call == "gather_latent" and config.kv_cache_dtype == _TILED and not config.dequantise:
            yield f"gathering {_TILED} as it is not supported"
        if config.kv_cache_dtype == _TILED and config.qk_rope_head_dim not in (0, 64):
            yield f"{config.qk_rope_head_dim} columns of rope not supported"

    def run_write_latent(
        self,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> None:
        """See :class:`MLACacheBackend`."""
        self._require("write_latent", kv_cache, kv_c.dtype, slot_dtype=slot_mapping.dtype)
        check_cache(self, kv_cache, kv_c.dtype)
        expect("kv_c", kv_c, (len(kv_c), self.kv_lora_rank), kv_c.dtype)
        expect("k_pe", k_pe, (len(k_pe), self.qk_rope_head_dim), kv_c.dtype)
        check_slots(slot_mapping, kv_cache, kv_c=kv_c, k_pe=k_pe)
        tokens = len(slot_mapping)
        parts = [kv_c[:tokens], k_pe[:tokens]]
        if self.kv_cache_dtype == _TILED:
            parts = [part.squeeze(1) for part in self.libraries[1].load().quantize_k_cache_separate(*parts)]
        rows, numbers = _rows(kv_cache), _numbers(slot_mapping, kv_cache)
        latent, rope = (part.shape[1] for part in parts)
        self.libraries[0].load().set_mla_kv_buffer_kernel[(tokens, 1)](
            rows,
            *parts,
            numbers,
            _NONE,
            rows.stride(0),
            *(part.stride(0) for part in parts),
            latent,
            rope,
            BLOCK=1 << (latent + rope - 1).bit_length(),
            DCP_RANK=0,
            DCP_WORLD_SIZE=1,
        )

    def run_gather_latent(
        self,
        kv_cache: torch.Tensor,
        workspace: torch.Tensor,
        block_table: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        seq_starts: torch.Tensor,
        k_scale: torch.Tensor,
        compress_ratio: int = 1,
    ) -> None:
        """See :class:`MLACacheBackend`."""
        asked = {"dequantise": workspace.dtype != kv_cache.dtype, "compress_ratio": compress_ratio}
        self._require("gather_latent", kv_cache, workspace.dtype, **asked)
        check_workspace(self, kv_cache, workspace)
        check_gather(kv_cache, block_table, cu_seq_lens, seq_starts, compress_ratio, workspace=workspace)
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
            self.libraries[0].load().get_mla_kv_buffer_triton(rows, numbers, *parts)

    def _require(self, call: str, kv_cache: torch.Tensor, dtype: torch.dtype, **asked: Any) -> None:
        """Refuse a call that is not declared."""
        dims = (self.kv_lora_rank, self.qk_rope_head_dim)
        layout, page = self.kv_cache_dtype, kv_cache.shape[1]
        config = MLACacheSelectorConfig(call, dtype, layout, page, *dims, self.tile_scales, **asked)
        reasons = self.validate_configuration(get_device_capability(kv_cache.device), config)
        if reasons:
            raise UnsupportedConfiguration(f"{self.get_name()}: {'; '.join(reasons)}")


class SGLangTritonCacheInterpreted(InterpretedKernel, SGLangTritonCacheBackend):
    """The same source by Triton's interpreter, without the codes, which are made of bfloat16 alone."""

    libraries: ClassVar[tuple[Library, ...]] = interpreted_libraries(SGLangTritonCacheBackend.libraries)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    declaration: ClassVar[Declaration] = interpreted_declaration(SGLangTritonCacheBackend.declaration)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[rows, width], of which a block begins every so many; of several layers' blocks the others are among them.

    Raises:
        ValueError: blocks are no whole number of rows apart.
    """
    blocks, page, width = cache.shape
    if cache.stride(0) % width:
        raise ValueError(f"kv_cache: expected blocks whole entries of {width} apart, got {cache.stride(0)}")
    return cache.as_strided(((blocks - 1) * cache.stride(0) // width + page, width), (width, 1))


def _numbers(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The rows of slots, int64; -1 of none."""
    page, apart = cache.shape[1], cache.stride(0) // cache.shape[2]
    return torch.where(slots < 0, _NONE, slots // page * apart + slots % page).long()
