"""TRITON_MLA: vLLM 0.33.0's Triton decode kernel, driven as ``TritonMLAImpl.forward_mqa`` drives it.

Beside torch and Triton it needs regex, cbor2 and dill, and where a GPU is vLLM's compiled extension.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.paged import PagedDecodeBackend

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


class TritonMLADecodeBackend(PagedDecodeBackend):
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
    refused = (
        (
            lambda c, device: 0 < c.kv_lora_rank < 16 or 0 < c.qk_rope_head_dim < 16,
            "latent dims (L, R) = ({c.kv_lora_rank}, {c.qk_rope_head_dim}) not supported: Triton multiplies 16 columns "
            "or more",
        ),
        (
            lambda c, device: c.kv_cache_dtype == "fp8" and device is not None and device < (8, 9),
            "kv_cache_dtype fp8 needs compute capability 8.9, this device has {device}",
        ),
    )

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
