"""VLLM_CACHE: the compiled kernels with which vLLM writes latents and index keys to its caches and gathers them again.

Written for vLLM 0.33.0 and called as its ``vllm/_custom_ops.py`` calls them: ``concat_and_cache_mla``,
``indexer_k_quant_and_cache``, ``gather_and_maybe_dequant_cache``, ``cp_gather_cache``,
``cp_gather_indexer_k_quant_cache`` and ``cp_gather_and_upconvert_fp8_kv_cache``. What computes slots there is written
in Triton, and is not among them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import cache_checks
from mla_conformance.backends.cache import CACHE_CALLS, MLACacheBackend
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.packaged import LibraryKernel, declared
from mla_conformance.backends.platform import FROM_TURING, DeviceCapability
from mla_conformance.backends.vllm_topk import VLLM_OPERATORS

_MIXED, _INDEX = "fp8_ds_mla", "fp8_index"
_INDEX_PAGE = 64
"""As vLLM's indexer has them on NVIDIA's GPUs."""
_WIDTHS = (320, 512, 576)
"""Of the rows that are gathered and dequantised at once."""


class VllmCacheBackend(LibraryKernel, MLACacheBackend):
    """Entries alone; any slots in int64."""

    name = "VLLM_CACHE"
    libraries = (VLLM_OPERATORS,)
    devices = FROM_TURING  # what the wheel has code for
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_calls = list(CACHE_CALLS[:4])
    supported_kv_cache_dtypes = ["auto", "fp8", _MIXED, _INDEX]
    supported_tile_scales = ["float32", "pow2"]
    declaration = declared(
        "vllm torch",
        ("writes as many index keys as it is handed", "those without a slot are cut off, as in vLLM"),
        ("reads latents of mixed entries and index keys in units of 16 and 8 bytes", "others are copied"),
        ("upconverts mixed entries of every row that it is handed", "the workspace is cut, as in vLLM"),
        ("gathers index keys from the first of a request on", "whole pages, of which the rows are taken"),
        ("knows no compression", "starts are divided by it"),
        ("writes powers of two alone into mixed entries", "other scales declared unsupported"),
    )

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        layout, width = config.kv_cache_dtype, config.kv_lora_rank + config.qk_rope_head_dim
        if layout == _INDEX and config.block_size != _INDEX_PAGE:
            yield f"{_INDEX} in pages of {config.block_size} not supported (supported: {_INDEX_PAGE})"
        if config.call in CACHE_CALLS[:2] and layout in (_MIXED, _INDEX) and config.dtype == torch.float32:
            yield f"{layout} of models in torch.float32 not supported"
        if config.call == "write_latent" and layout == _MIXED and config.tile_scales != "pow2":
            yield f"{_MIXED} with {config.tile_scales} scales not supported (writes pow2)"
        if config.dequantise and layout == _MIXED and (width, config.dtype) != (576, torch.bfloat16):
            yield f"{_MIXED} becomes keys of 576 columns in torch.bfloat16 alone"
        if config.dequantise and layout == "fp8" and width not in _WIDTHS:
            yield f"keys of {width} columns are not dequantised (supported: {', '.join(map(str, _WIDTHS))})"

    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        cache_checks.require_call(self, "write_latent", kv_cache, kv_c.dtype, slot_dtype=slot_mapping.dtype)
        cache_checks.check_latents(self, kv_c, k_pe, kv_cache, slot_mapping)
        if self.kv_cache_dtype == _MIXED:
            kv_c, k_pe = aligned(kv_c), aligned(k_pe)
        if len(slot_mapping):
            _operators().concat_and_cache_mla(
                kv_c, k_pe, kv_cache, slot_mapping.contiguous(), self.kv_cache_dtype, k_scale
            )

    def run_write_index(self, k: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        cache_checks.require_call(self, "write_index", kv_cache, k.dtype, slot_dtype=slot_mapping.dtype)
        cache_checks.check_index_keys(self, k, kv_cache, slot_mapping)
        if len(slot_mapping):
            keys, scales = aligned(k[: len(slot_mapping)].contiguous()), {"pow2": "ue8m0", "float32": "fp32"}
            options = (k.shape[1], scales[self.tile_scales])
            _operators().indexer_k_quant_and_cache(keys, kv_cache, slot_mapping.contiguous(), *options)

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
        as_stored = workspace.dtype == kv_cache.dtype
        dtype = torch.bfloat16 if as_stored and self.kv_cache_dtype != "auto" else workspace.dtype
        cache_checks.require_call(
            self, "gather_latent", kv_cache, dtype, dequantise=not as_stored, compress_ratio=compress_ratio
        )
        cache_checks.check_workspace(self, kv_cache, workspace)
        cache_checks.check_gather(kv_cache, block_table, cu_seq_lens, seq_starts, compress_ratio, workspace=workspace)
        operators, layout, starts = _operators(), self.kv_cache_dtype, seq_starts // compress_ratio
        rows, requests = int(cu_seq_lens[-1]), len(block_table)
        if layout == _MIXED and not as_stored:
            operators.cp_gather_and_upconvert_fp8_kv_cache(
                kv_cache, workspace[:rows], block_table, cu_seq_lens[:-1], requests, starts
            )
        elif workspace.shape[1] in _WIDTHS and (layout == "auto" or not as_stored):
            operators.gather_and_maybe_dequant_cache(
                kv_cache, workspace, block_table, cu_seq_lens, _request_of(cu_seq_lens), rows, layout, k_scale, starts
            )
        else:
            operators.cp_gather_cache(kv_cache, workspace, block_table, cu_seq_lens, requests, starts)

    def run_gather_index(
        self,
        kv_cache: Tensor,
        k: Tensor,
        k_scale: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        seq_starts: Tensor,
        compress_ratio: int = 1,
    ) -> None:
        cache_checks.require_call(self, "gather_index", kv_cache, torch.bfloat16, compress_ratio=compress_ratio)
        cache_checks.check_index_room(self, kv_cache, k, k_scale)
        cache_checks.check_gather(kv_cache, block_table, cu_seq_lens, seq_starts, compress_ratio, k=k, k_scale=k_scale)
        start, page, lengths = seq_starts // compress_ratio, kv_cache.shape[1], cu_seq_lens.diff()
        aside, last = start % page, block_table.shape[1] - 1
        # The table from a column of each request on, since those before it may hold anything; behind it anything.
        columns = torch.arange(last + 1, device=start.device) + (start // page).unsqueeze(1)
        table = block_table.gather(1, columns.clamp(max=last))
        ends = (lengths + aside * (lengths > 0)).cumsum(0, dtype=torch.int32)
        if rows := int(ends[-1]):
            codes, scales = k.new_empty(rows, k.shape[1]), k_scale.new_empty(rows, 1)
            _operators().cp_gather_indexer_k_quant_cache(
                kv_cache, codes, scales.view(torch.uint8), table, pad(ends, (1, 0))
            )
            request = _request_of(cu_seq_lens)
            asked = torch.arange(len(request), device=k.device) + (ends - cu_seq_lens[1:])[request]
            k.view(torch.uint8)[: len(asked)] = codes.view(torch.uint8)[asked]
            k_scale[: len(asked)] = scales[asked, 0]


def _operators() -> Any:
    """Those that vLLM's compiled library registers."""
    VLLM_OPERATORS.load()
    return torch.ops._C_cache_ops


def _request_of(cu_seq_lens: Tensor) -> Tensor:
    """[S] int32, the request of each row."""
    requests = torch.arange(len(cu_seq_lens) - 1, dtype=torch.int32, device=cu_seq_lens.device)
    return requests.repeat_interleave(cu_seq_lens.diff())
