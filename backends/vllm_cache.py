"""VLLM_CACHE: the compiled kernels by which vLLM 0.33.0 writes and gathers its caches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from mla_conformance.backends import packaged
from mla_conformance.backends.cache import CACHE_CALLS
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.steps import CacheKernel
from mla_conformance.backends.vllm_topk import VLLM_OPERATORS

_MIXED, _INDEX = "fp8_ds_mla", "fp8_index"
_INDEX_PAGE = 64  # as vLLM's indexer has them on NVIDIA's GPUs
_WIDTHS = (320, 512, 576)  # of the rows that are gathered and dequantised at once


class VllmCacheBackend(CacheKernel):
    name = "VLLM_CACHE"
    libraries = (VLLM_OPERATORS,)
    devices = packaged.FROM_TURING  # what the wheel has code for
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_calls = list(CACHE_CALLS[:4])
    supported_kv_cache_dtypes = ["auto", "fp8", _MIXED, _INDEX]
    supported_tile_scales = ["float32", "pow2"]
    declaration = packaged.declared(
        "vllm torch",
        ("writes as many index keys as it is handed", "those without a slot are cut off, as in vLLM"),
        ("reads latents of mixed entries and index keys in units of 16 and 8 bytes", "others are copied"),
        ("upconverts mixed entries of every row that it is handed", "the workspace is cut, as in vLLM"),
        ("gathers index keys from the first of a request on", "whole pages, of which the rows are taken"),
        ("knows no compression", "starts are divided by it"),
        ("writes powers of two alone into mixed entries", "other scales declared unsupported"),
    )

    @classmethod
    def _reasons(cls, config: Any) -> Iterator[str]:
        yield from super()._reasons(config)
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

    @property
    def library(self) -> Any:
        VLLM_OPERATORS.load()
        return torch.ops._C_cache_ops

    def write_latent(self, x: Any) -> None:
        parts = [aligned(part) if self.kv_cache_dtype == _MIXED else part for part in (x.kv_c, x.k_pe)]
        slots = x.slot_mapping.contiguous()
        self.library.concat_and_cache_mla(*parts, x.kv_cache, slots, self.kv_cache_dtype, x.k_scale)

    def write_index(self, x: Any) -> None:
        keys, slots = aligned(x.k[: len(x.slot_mapping)].contiguous()), x.slot_mapping.contiguous()
        scales = {"pow2": "ue8m0", "float32": "fp32"}[self.tile_scales]
        self.library.indexer_k_quant_and_cache(keys, x.kv_cache, slots, keys.shape[1], scales)

    def gather_latent(self, x: Any) -> None:
        library, layout, as_stored = self.library, self.kv_cache_dtype, x.workspace.dtype == x.kv_cache.dtype
        table, starts, rows, requests = x.block_table, x.cu_seq_lens, len(x.request), len(x.block_table)
        if layout == _MIXED and not as_stored:
            written = (x.kv_cache, x.workspace[:rows], table, starts[:-1])
            library.cp_gather_and_upconvert_fp8_kv_cache(*written, requests, x.starts)
        elif x.workspace.shape[1] in _WIDTHS and (layout == "auto" or not as_stored):
            tables = (table, starts, x.request, rows, layout, x.k_scale, x.starts)
            library.gather_and_maybe_dequant_cache(x.kv_cache, x.workspace, *tables)
        else:
            library.cp_gather_cache(x.kv_cache, x.workspace, table, starts, requests, x.starts)

    def gather_index(self, x: Any) -> None:
        page, last = x.kv_cache.shape[1], x.block_table.shape[1] - 1
        # The table from a column of each request on, since those before it may hold anything; behind it anything.
        columns = torch.arange(last + 1, device=x.starts.device) + (x.starts // page).unsqueeze(1)
        table = x.block_table.gather(1, columns.clamp(max=last))
        ends = (x.lengths + x.starts % page * (x.lengths > 0)).cumsum(0, dtype=torch.int32)
        if rows := int(ends[-1]):
            codes, scales = x.k.new_empty(rows, x.k.shape[1]), x.k_scale.new_empty(rows, 1)
            written = (codes, scales.view(torch.uint8), table, pad(ends, (1, 0)))
            self.library.cp_gather_indexer_k_quant_cache(x.kv_cache, *written)
            asked = torch.arange(len(x.request), device=x.k.device) + (ends - x.cu_seq_lens[1:])[x.request]
            x.k.view(torch.uint8)[: len(asked)] = codes.view(torch.uint8)[asked]
            x.k_scale[: len(asked)] = scales[asked, 0]
