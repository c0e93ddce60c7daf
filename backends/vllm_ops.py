"""VLLM_TOPK, VLLM_CACHE: compiled kernels of vLLM 0.33.0 around attention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import cache, conversions, library_roles, packaged
from mla_conformance.reference.selected import NO_KEY

_NOTE = "its wheels for CUDA have these operators"
VLLM_OPERATORS = packaged.in_extra("vllm", "vllm._C_stable_libtorch", note=_NOTE)
"""Importing it registers them with torch."""
_ROWS = 64  # that the cooperative kernel takes at once
_WORKSPACE = ("wants a workspace", "of 1 MiB, which holds anything, as in vLLM")


class VllmTopKBackend(library_roles.TopKKernel):
    """The family: first the kernel of a prefill, which alone takes every call."""

    name = "VLLM_TOPK"
    libraries = (VLLM_OPERATORS,)
    devices = packaged.FROM_TURING  # what the wheel has code for
    by_device = {0: ("prefill", "decode", "persistent", "cooperative")}
    supports_row_starts = False
    fill: Callable[..., None]  # a variant's, into numbers that the caller made
    declaration = packaged.declared(
        "vllm torch", ("writes into numbers of its caller", "-1 beforehand, as in vLLM"), deterministic=False
    )

    def select(self, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
        output = torch.full((len(logits), topk_tokens), NO_KEY, dtype=torch.int32, device=logits.device)
        _ = self.library  # whose loading registers the operators
        self.fill(logits, lengths.contiguous(), output)
        return output


def _prefill(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    given = self._topk_metadata.row_starts
    starts = torch.zeros_like(lengths) if given is None else given.contiguous()
    sizes = (len(logits), *logits.stride(), output.shape[1])
    torch.ops._C.top_k_per_row_prefill(logits, starts, starts + lengths, output, *sizes)


def _decode(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    """Each row is of a request of one query token."""
    sizes = (len(logits), *logits.stride(), output.shape[1])
    torch.ops._C.top_k_per_row_decode(logits, 1, lengths, output, *sizes)


def _persistent(self: Any, logits: Tensor, lengths: Tensor, output: Tensor, operator: str = "persistent_topk") -> None:
    """In its turn it takes one of several kernels, by the size of the batch."""
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=logits.device)
    sizes = (output.shape[1], self._topk_metadata.max_seq_len)
    getattr(torch.ops._C, operator)(logits, lengths, output, workspace, *sizes)


def _cooperative(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    """A cluster of thread blocks for each row."""
    (rows, columns), unit = logits.shape, conversions.ALIGNMENT // 4
    if logits.stride(0) % unit or logits.data_ptr() % conversions.ALIGNMENT:
        logits = logits.new_empty(rows, -(-columns // unit) * unit)[:, :columns].copy_(logits)
    for few, own, written in zip(*(x.split(_ROWS) for x in (logits, lengths, output)), strict=True):
        _persistent(self, few, own, written, operator="cooperative_topk")


_ZEROS = ("wants starts and ends", "zeros where there are no starts, as in vLLM")
VllmTopKBackend.also("prefill", _ZEROS, fill=_prefill, supports_row_starts=True)
VllmTopKBackend.also("decode", fill=_decode)
VllmTopKBackend.also("persistent", _WORKSPACE, fill=_persistent, supported_topk=[512, 1024, 2048]).also(
    "cooperative",
    (f"takes {_ROWS} rows, beyond which vLLM takes the persistent one", "a call for each so many"),
    ("takes rows at multiples of 16 bytes alone", "others are copied"),
    fill=_cooperative,
    devices=packaged.Devices("9.0 or newer, but not 12.x", (9, 0), but=12),
)


_MIXED, _INDEX = "fp8_ds_mla", "fp8_index"
_INDEX_PAGE = 64  # as vLLM's indexer has them on NVIDIA's GPUs
_WIDTHS = (320, 512, 576)  # of the rows that are gathered and dequantised at once


class VllmCacheBackend(library_roles.CacheKernel):
    name = "VLLM_CACHE"
    libraries = (VLLM_OPERATORS,)
    devices = packaged.FROM_TURING  # what the wheel has code for
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_calls = list(cache.CACHE_CALLS[:4])
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
        if config.call in cache.CACHE_CALLS[:2] and layout in (_MIXED, _INDEX) and config.dtype == torch.float32:
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
        parts = [conversions.aligned(part) if self.kv_cache_dtype == _MIXED else part for part in (x.kv_c, x.k_pe)]
        slots = x.slot_mapping.contiguous()
        self.library.concat_and_cache_mla(*parts, x.kv_cache, slots, self.kv_cache_dtype, x.k_scale)

    def write_index(self, x: Any) -> None:
        keys, slots = conversions.aligned(x.k[: len(x.slot_mapping)].contiguous()), x.slot_mapping.contiguous()
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
