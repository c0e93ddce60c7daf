"""vLLM 0.33.0's kernels as its backends drive them: VLLM_TOPK, VLLM_CACHE, TRITON_MLA, TRITON_ATTN, CUTLASS_MLA."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

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
    torch.ops._C.top_k_per_row_decode(logits, 1, lengths, output, len(logits), *logits.stride(), output.shape[1])


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


_COPIED_PAGE = 16  # of what TRITON_ATTN reads
_OPERATOR, _HEADS, _PAGE, _AUTOMATIC = "sm100_cutlass_mla_decode", 128, 128, -1  # of CUTLASS_MLA
_OLD_DEVICE = "kv_cache_dtype fp8 needs compute capability 8.9, this device has {device}"
_FEW_COLUMNS = "latent dims (L, R) = ({c.kv_lora_rank}, {c.qk_rope_head_dim}) not supported: "
_FEW_COLUMNS += "Triton multiplies 16 columns or more"
_UNBUILT = "a vLLM without its compiled extension does not import where there is a GPU"
_KEPT = packaged.declared(
    "vllm triton",
    packaged.JOINS_Q,
    ("no causal mask", "a row of its own for each query token, with the keys that it sees, as vLLM's backend does"),
    packaged.LSE_TOKENS_FIRST,
    packaged.NAN_WITHOUT_KEYS,
    ("latent and rope dims below 16 do not compile", "declared unsupported"),
    ("several query tokens a request not under decode context parallelism", "declared unsupported"),
    ("an e4m3 cache is dequantised to the model's dtype", "declared dequantised keys: model"),
    rounding=packaged.DEQUANTISES,
)


class TritonMLADecodeBackend(library_roles.PagedDecodeBackend):
    """Uniform batches; the LSE is stored in the query's dtype, because vLLM's backend allocates it so."""

    name = "TRITON_MLA"
    libraries = (packaged.in_extra("vllm", "vllm.v1.attention.ops.triton_decode_attention", note=_UNBUILT),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_block_sizes = [packaged.MultipleOf(16)]
    supported_latent_dims = []
    supported_kv_cache_dtypes = ["auto", "fp8"]
    supported_query_len = None
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(_KEPT, ("LSE of the query's dtype", "widened to float32"))
    lse_dtype: ClassVar[torch.dtype | None] = None
    refused = {
        _FEW_COLUMNS: lambda c, device: 0 < c.kv_lora_rank < 16 or 0 < c.qk_rope_head_dim < 16,
        _OLD_DEVICE: lambda c, device: c.kv_cache_dtype == "fp8" and device is not None and device < (8, 9),
    }

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, q, cache = self._decode_metadata, torch.cat([ql_nope, q_pe], dim=-1), kv_cache.unsqueeze(2)
        output, lse = q.new_zeros(ql_nope.shape), q.new_zeros(q.shape[:2], dtype=self.lse_dtype or q.dtype)
        units = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        # As ``_compute_num_kv_splits`` of vLLM's backend: a power of two, unless there are too few compute units.
        splits = min(1 << (max(1, metadata.max_seq_len // 512) - 1).bit_length(), 2 * units)
        table, lengths, queries = metadata.block_table, metadata.seq_lens, len(q) // len(metadata.seq_lens)
        if queries > 1:  # a row for each token; the last one of a request sees all keys
            behind = torch.arange(1 - queries, 1, device=lengths.device, dtype=lengths.dtype)
            table, lengths = table.repeat_interleave(queries, dim=0), (lengths[:, None] + behind).flatten().clamp(min=0)
        partial = q.new_empty(*q.shape[:2], splits, self.kv_lora_rank + 1, dtype=torch.float32)
        operands = (q, cache, cache[..., : self.kv_lora_rank], output, lse, table, lengths, partial, splits, self.scale)
        options = {"k_scale": k_scale, "v_scale": k_scale, "is_mla": True}
        self.library.decode_attention_fwd(*operands, cache.shape[1], **options)
        self._served = {"splits": str(splits)}
        return output, lse.mT.float()


# The same with a float32 buffer for its LSE, which shows what is the kernel's own error.
_FLOAT32 = packaged.further(_KEPT, ("vLLM's backend allocates the LSE in the query's dtype", "in float32"))
TritonMLADecodeBackend.also("lse-float32", declaration=_FLOAT32, lse_dtype=torch.float32)
packaged.interpreted(TritonMLADecodeBackend)


class TritonAttnPrefillBackend(library_roles.RaggedPrefillBackend):
    """Paged attention on new tokens; without an LSE it serves no context chunk, nor new tokens behind a context."""

    name = "TRITON_ATTN"
    libraries = (packaged.in_extra("vllm", "vllm.v1.attention.ops.triton_unified_attention"),)
    devices = packaged.FROM_ADA  # where Triton converts to e4m3
    takes_head_dims = staticmethod(lambda qk, v: v <= qk and qk >= 32)  # as vLLM's backend; V is padded and not cut
    writes_e4m3 = True
    returns_lse = False
    declaration = packaged.declared(
        "vllm triton",
        ("reads keys and values of pages", "copies them into pages of 16 tokens"),
        ("wants V as wide as K", "V is padded with zeros, and the result cut"),
        packaged.RETURNS_NO_LSE_OF_CHUNKS,
        ("e4m3 output: times the reciprocal of the scale, clamped at ±448, rounded to nearest even", "as it is"),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: conversions.RaggedBatch, out: Tensor | None) -> Tensor:
        lengths, pages = batch.query_lens, -(-max(batch.query_lens) // _COPIED_PAGE)
        table = torch.arange(len(lengths) * pages, dtype=torch.int32).view(len(lengths), pages)
        slots = [torch.arange(length) + request * pages * _COPIED_PAGE for request, length in enumerate(lengths)]
        place = torch.cat(slots).to(q.device)
        stored = []
        for x in (k, conversions.pad_head_dim(v, q.shape[-1])):
            rows = x.new_zeros(table.numel() * _COPIED_PAGE, *x.shape[1:])
            rows[place] = x
            stored.append(rows.view(table.numel(), _COPIED_PAGE, *x.shape[1:]))
        starts, _, longest_query, longest_key = batch.lengths
        wide = q.new_empty(q.shape, dtype=q.dtype if out is None else out.dtype)
        operands = {"q": q.contiguous(), "k": stored[0], "v": stored[1], "out": wide}
        queries = {"cu_seqlens_q": starts, "max_seqlen_q": longest_query}
        keys = {"seqused_k": starts.diff(), "max_seqlen_k": longest_key, "block_table": table.to(q.device)}
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale")) | {"output_scale": self._output_scale}
        options = {"softmax_scale": self.scale, "causal": True, "window_size": (-1, -1), "softcap": 0, **scales}
        self.library.unified_attention(**operands, **queries, **keys, **options)
        return wide[..., : self.v_head_dim]


class CutlassMLADecodeBackend(library_roles.PagedDecodeBackend):
    """Compiled for Blackwell; its LSE is natural, [B, 128]."""

    name = "CUTLASS_MLA"
    libraries = (packaged.Library("vllm._custom_ops", "vllm", "pip install vllm"),)
    devices = packaged.BLACKWELL
    supported_block_sizes = [_PAGE]  # which vLLM gives it
    cudagraph_support = packaged.ONE_TOKEN_EACH
    declaration = packaged.declared(
        "vllm torch",
        ("computes 128 heads", "queries are padded with zeros, output and LSE are sliced"),
        packaged.LSE_TOKENS_FIRST,
        packaged.LSE_INFINITE,
        packaged.PACKS_TABLE,
        ("a cache must start at multiples of 16 bytes", "another is copied"),
        ("reads an e4m3 cache only under queries in e4m3, and no scale", "declared unsupported"),
    )

    @classmethod
    def lacks(cls) -> str:
        said = f"package vllm is installed, but its compiled operators lack {_OPERATOR}; its wheels for CUDA have it"
        return "" if hasattr(torch.ops._C, _OPERATOR) else said

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        table, tokens = self._decode_metadata.block_table, len(ql_nope)
        query = [pad(x, (0, 0, 0, _HEADS - self.num_heads)).contiguous() for x in (ql_nope, q_pe)]
        output = query[0].new_empty(tokens, _HEADS, self.kv_lora_rank)
        lse = output.new_empty(tokens, _HEADS, dtype=torch.float32)
        # For the longest sequence that the block table has room for; 0 stands for this device.
        room = (table.shape[1] * _PAGE, tokens, 0)
        size = self.library.sm100_cutlass_mla_get_workspace_size(*room, num_kv_splits=_AUTOMATIC)
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=table.device)
        batch = (self._decode_metadata.seq_lens, table.contiguous(), workspace, self.scale, _AUTOMATIC)
        self.library.sm100_cutlass_mla_decode(output, lse, *query, conversions.aligned(kv_cache), *batch)
        return output[:, : self.num_heads], lse[:, : self.num_heads].mT
