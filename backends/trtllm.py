"""TRTLLM: TensorRT-LLM's own attention, through the wrapper that its PyTorch engine plans and runs in each layer.

Never run on a GPU, written from NVIDIA/TensorRT-LLM at f3de61e7 and 3e323973, ``TrtllmAttention.forward``, and below it
at eea41b73. Lengths are read on the host, so that no CUDA graph is declared.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import kernel, library_roles, packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, starts_of
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.reference import dimensions

_NOTE = "the package index has a stub, its wheels are at --extra-index-url https://pypi.nvidia.com"
_STATS = "returns a row's largest logit and sum, [T, N, 2]"


class _TrtllmKernel(packaged.LibraryKernel, kernel.HeadSizes):
    name = "TRTLLM"
    libraries = (packaged.in_extra("tensorrt-llm", "tensorrt_llm._torch.attention_backend.trtllm", note=_NOTE),)
    devices = packaged.Devices("9.0 or 10.x", (9, 0), (11, 0))
    by_device = {10: ("sm100",), 0: ("sm90",)}

    @classmethod
    def lacks(cls) -> str:
        run = getattr(getattr(cls.libraries[0].load(), "TrtllmAttentionWrapper", None), "run", None)
        if run and packaged.has_parameter(run, "cu_q_seqlens"):
            return ""
        reason = "its attention is called otherwise than in those versions that the adapter was written from"
        return f"package tensorrt-llm {cls.libraries[0].version()} is installed, but {reason}"

    def call(
        self, q: Tensor, output: Tensor, queries: Tensor, keys: Tensor, cache: Tensor, table: Tensor, **more: Any
    ) -> None:
        """Plan and run for q [T, N · width], a generation if ``q_pe`` is handed over; lengths are on the host."""
        trtllm, heads, generation = self.library, self.num_heads, "q_pe" in more
        sizes = {name: getattr(self, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
        predicted = int(queries.max()) if generation else 1
        sizes |= {"v_head_dim": output.shape[1] // heads, "predicted_tokens_per_seq": predicted}
        made = {"num_kv_heads": 1 if generation else heads, "mla_params": trtllm.MLAParams(**sizes)}
        made["q_scaling"] = 1.0 / (self.scale * math.sqrt(self.dimensions.qk_head_dim))
        wrapper = trtllm.TrtllmAttentionWrapper(heads, q.shape[1] // heads, **made)
        wrapper.update_quant_config(trtllm.QuantConfig(kv_cache_quant_algo="FP8") if more.pop("codes", False) else None)
        longest, most = 1 << int(max(queries.max(), keys.max())).bit_length(), 1 << len(table).bit_length()
        total = int(keys.sum())
        offsets = torch.stack([table, table], dim=1)[None]  # of keys and of values, in the one pool
        handed: dict[str, Any] = {
            "q": q,
            "output": output,
            "is_fused_qkv": generation,
            "tokens_per_block": cache.shape[1],
            "max_num_requests": most,  # an operator is made and kept for each of these bounds
            "max_sequence_length": longest,
            "max_context_length": longest,
            "sequence_length": keys.to(q.device),
            "host_past_key_value_lengths": keys,  # all of them, whatever its name says
            "host_total_kv_lens": torch.tensor([0, total] if generation else [total, 0], dtype=torch.int32),
            "context_lengths": queries.to(q.device),
            "host_context_lengths": queries,
            "host_request_types": torch.full_like(queries, int(generation)),
            "kv_cache_block_offsets": offsets,
            "host_kv_cache_block_offsets": offsets.cpu(),
            "host_kv_cache_pool_pointers": torch.tensor([[cache.data_ptr(), 0]], dtype=torch.int64),
            "host_kv_cache_pool_mapping": torch.zeros(1, 2, dtype=torch.int32),  # the first layer of the first pool
            "block_ids_per_seq": table,
            "workspace": q.new_empty(0, dtype=torch.int8),  # which the operator enlarges
            "kv_scale_orig_quant": q.new_ones(1, dtype=torch.float32),
            "kv_scale_quant_orig": q.new_ones(1, dtype=torch.float32),
            "attention_input_type": trtllm.AttentionInputType["generation_only" if generation else "context_only"],
            **more,
        }
        known = inspect.signature(wrapper.plan).parameters
        wrapper.plan(**{name: handed.pop(name) for name in known if name in handed})
        handed.pop("host_kv_cache_block_offsets", None)  # which 3e323973 no longer asks for
        wrapper.run(**handed)


class TrtllmPrefillBackend(_TrtllmKernel, library_roles.RaggedPrefillBackend):
    supported_dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    blanks = ("output", "lse")
    supported_mla_dimensions = [dimensions.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)]
    declaration = packaged.declared(
        "tensorrt-llm",
        ("without latents it neither rotates nor writes the cache", "none are handed over, and a cache of one block"),
        ("reads v with the row stride N · (P + V), as its projection leaves it", "v is copied into such rows"),
        ("strides of q and k are ignored", "both are made contiguous"),
        ("makes e4m3 codes of bfloat16 itself", "e4m3 operands are widened and become the same codes, the scale is 1"),
        ("writes an e4m3 output of e4m3 operands alone", "declared unsupported"),
        ("sums float16 in float16", "declared unsupported"),
        (f"{_STATS}, the logit on 9.0 times (P + R)^-1/2 alone", "natural LSE with all of the scale, [N, T]"),
        ("a row without keys is undefined", "0 and -inf by the lengths"),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        codes, heads, masks = q.dtype == torch.float8_e4m3fn, self.num_heads, self.library.PredefinedAttentionMask
        q, k, v = (x.bfloat16().flatten(1).contiguous() for x in (q, k, v))
        beside = heads * self.qk_nope_head_dim
        values = v.new_empty(len(v), beside + heads * self.v_head_dim)[:, beside:].copy_(v)
        stats = q.new_empty(len(q), heads, 2, dtype=torch.float32)
        queries, keys = (torch.tensor(lengths, dtype=torch.int32) for lengths in (batch.query_lens, batch.key_lens))
        options: dict[str, Any] = {"codes": codes, "k": k, "v": values, "softmax_stats_tensor": stats}
        options["attention_mask"] = masks.CAUSAL if batch.causal else masks.FULL
        options["chunked_prefill_buffer_batch_size"] = -(-len(k) // len(q))  # room for codes, in multiples of q
        written = None if out is None or not out.is_contiguous() else out.flatten(1)
        output = q.new_empty(len(q), heads * self.v_head_dim) if written is None else written
        block = q.new_empty(1, 64, self.kv_lora_rank + self.qk_rope_head_dim)
        self.call(q, output, queries, keys, block, queries.new_zeros(len(keys), 1).to(q.device), **options)
        rest = 1.0 if self.variant == "sm100" else self.scale * math.sqrt(self.dimensions.qk_head_dim)  # of the scale
        return output.unflatten(1, (heads, -1)), (stats[..., 0] * rest + stats[..., 1].log()).mT


# Kernels of its fmha_v2, and those that come compiled, which are TRTLLM_RAGGED's.
TrtllmPrefillBackend.also("sm90", packaged.FP22_SUMS, devices=packaged.HOPPER, e4m3_rounding=packaged.SCALED_P_FP22)
TrtllmPrefillBackend.also("sm100", devices=packaged.BLACKWELL, e4m3_rounding=Rounding(p=Precision.SCALED_E4M3))


class TrtllmDecodeBackend(_TrtllmKernel, library_roles.PagedDecodeBackend):
    supported_dtypes = [torch.bfloat16]
    supported_block_sizes = [64]
    supported_latent_dims = [(512, 64)]
    supported_query_len = None
    declaration = packaged.declared(
        "tensorrt-llm",
        ("an operator before it rotates, writes the cache and counts lengths", "lengths are counted, and no more"),
        packaged.JOINS_Q,
        ("takes the address of a pool and the numbers of its blocks", "those of the cache, copied if blocks are apart"),
        ("reads an e4m3 cache only under queries in e4m3, of the same scale", "declared unsupported"),
        ("asks for the step's latents and does not read them", "queries stand for them"),
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        metadata, heads, page = self._decode_metadata, self.num_heads, kv_cache.shape[1]
        query = torch.cat([ql_nope, q_pe], dim=-1)
        output = query.new_empty(len(query), heads, self.kv_lora_rank)
        used = torch.arange(metadata.block_table.shape[1], device=query.device) * page < metadata.seq_lens[:, None]
        stats = query.new_empty(len(query), heads, 2, dtype=torch.float32) if self.returns_lse else None
        options: dict[str, Any] = {"q_pe": query[..., self.kv_lora_rank :], "latent_cache": query[:, 0]}
        options |= {"softmax_stats_tensor": stats, "cu_q_seqlens": metadata.query_start_loc * heads}  # a row is a head
        counter = torch.zeros(1, dtype=torch.uint32, device=query.device)
        options |= {"cu_kv_seqlens": starts_of(metadata.seq_lens), "fmha_scheduler_counter": counter}
        batch = (metadata.query_lens_cpu, metadata.seq_lens_cpu, aligned(kv_cache).contiguous())
        self.call(query.flatten(1), output.flatten(1), *batch, metadata.block_table.where(used, 0), **options)
        return output if stats is None else (output, (stats[..., 0] + stats[..., 1].log()).mT)


# FlashMLA, which it compiles in, and kernels that come compiled.
_HALF = [torch.float16, torch.bfloat16]
TrtllmDecodeBackend.also(
    "sm90", packaged.RETURNS_NO_LSE, devices=packaged.HOPPER, supported_dtypes=_HALF, returns_lse=False
)
_SCALED = (f"{_STATS}, the logit scaled", "natural LSE, [N, T]")
TrtllmDecodeBackend.also("sm100", _SCALED, devices=packaged.BLACKWELL, supported_block_sizes=[32, 64])
