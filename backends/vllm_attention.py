"""TRITON_MLA, TRITON_ATTN, CUTLASS_MLA: kernels of vLLM 0.33.0, driven as its backends drive them."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import conversions, library_roles, packaged

_COPIED_PAGE = 16  # of what TRITON_ATTN reads
_OPERATOR, _HEADS, _PAGE, _AUTOMATIC = "sm100_cutlass_mla_decode", 128, 128, -1  # of CUTLASS_MLA
_OLD_DEVICE = "kv_cache_dtype fp8 needs compute capability 8.9, this device has {device}"
_FEW_COLUMNS = "latent dims (L, R) = ({c.kv_lora_rank}, {c.qk_rope_head_dim}) not supported: "
_FEW_COLUMNS += "Triton multiplies 16 columns or more"
_NOTE = "a vLLM without its compiled extension does not import where there is a GPU"
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
    libraries = (packaged.in_extra("vllm", "vllm.v1.attention.ops.triton_decode_attention", note=_NOTE),)
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
