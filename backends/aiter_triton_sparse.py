"""AITER_TRITON_SPARSE: ROCm/aiter at e4048607, ``aiter/ops/triton/attention/unified_attention_sparse_mla.py``."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.aiter_triton import PAGES, InterpretedAiter, aiter_library
from mla_conformance.backends.selected import Selected, SelectedKeysBackend


class AiterTritonSparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "AITER_TRITON_SPARSE"
    libraries = (aiter_library("unified_attention_sparse_mla"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_block_sizes = PAGES
    supported_calls = ["decode"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64), (256, 64)]
    supported_heads = [16 * tiles for tiles in range(1, 9)]
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "amd-aiter triton",
        packaged.COMPUTES_NO_LSE,
        ("computes whole tiles of 16 heads", "other numbers are declared unsupported"),
        ("wants columns of queries and lists without gaps", "copies others"),
        ("a list that names no key makes its row NaN, as its source says", "0 in such rows"),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (listed,), x = sources, self._sparse_metadata
        indices, output = listed.indices.contiguous(), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        operands = {"q": q.contiguous(), "kv": listed.cache.unsqueeze(2), "out": output, "topk_indices": indices}
        queries = {"cu_seqlens_q": x.query_start_loc, "max_seqlen_q": x.max_query_len}
        keys = {"seqused_k": x.seq_lens, "max_seqlen_k": x.max_seq_len, "block_table": x.block_table}
        sizes = {"softmax_scale": self.scale, "kv_lora_rank": self.kv_lora_rank}
        self.library.unified_attention_sparse_mla(**operands, **queries, **keys, **sizes)
        return output.masked_fill_((indices < 0).all(dim=1)[:, None, None], 0.0), None


packaged.interpreted(AiterTritonSparseBackend, InterpretedAiter)
