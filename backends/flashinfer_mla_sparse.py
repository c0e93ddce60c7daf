"""FLASHINFER_MLA_SPARSE: TensorRT-LLM's sparse decode kernels for Blackwell, from FlashInfer 0.7.2; never run."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.flashinfer import DISTRIBUTIONS, WORKSPACE_BYTES
from mla_conformance.backends.flashinfer_mla import FlashInferMLADecodeBackend
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_STATISTICS_BYTES = 8 * 256  # of the workspace, for each head of each query token, where the LSE is asked for


class FlashInferMLASparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "FLASHINFER_MLA_SPARSE"
    libraries = FlashInferMLADecodeBackend.libraries
    devices = packaged.BLACKWELL
    supported_block_sizes = [32, 64]  # as vLLM has them
    supported_calls = ["decode"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("reads as many entries of a list as lengths say, -1 among them", "packed on the device, counted"),
        packaged.LSE_TO_BASE_2,
        ("a cache with gaps between its blocks was not tried", "such a cache is copied"),
        ("writes its output in bfloat16 alone", "other models declared unsupported"),
        ("the workspace must be zero", "a new one at each call"),
        ("reads an e4m3 cache under queries in e4m3 alone", "declared unsupported"),
        ("takes sinks, and does not say whether the LSE holds them", "declared unsupported"),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        (source,), columns = sources, sources[0].indices.shape[1]
        slots, lengths = packed(source.indices, listed(source.indices, source.length))
        workspace = q.new_zeros(WORKSPACE_BYTES + _STATISTICS_BYTES * len(q) * self.num_heads, dtype=torch.int8)
        operands = {"query": q.contiguous().unsqueeze(1), "kv_cache": source.cache.contiguous().unsqueeze(1)}
        dims = {name: getattr(self, name) for name in ("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")}
        lists = {"block_tables": slots.unsqueeze(1), "seq_lens": lengths, "workspace_buffer": workspace}
        sizes = {"max_seq_len": columns, "sparse_mla_top_k": columns, "bmm1_scale": self.scale, "bmm2_scale": 1.0}
        options = {"backend": "trtllm-gen", "return_lse": True, "return_lse_base": "basee"}
        call = self.library.trtllm_batch_decode_with_kv_cache_mla
        output, lse = call(**operands, **dims, **lists, **sizes, **options)
        return output.squeeze(1), lse.mT
