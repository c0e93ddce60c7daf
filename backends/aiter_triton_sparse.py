"""AITER_TRITON_SPARSE: AITER's Triton kernel of sparse MLA over a paged cache, which runs on NVIDIA's GPUs as well.

Written for ROCm/aiter at e4048607, ``aiter/ops/triton/attention/unified_attention_sparse_mla.py``.
"""

import torch
from torch import Tensor

from mla_conformance.backends.aiter_triton import PAGES, InterpretedAiter, aiter_library
from mla_conformance.backends.interpreted import interpreted
from mla_conformance.backends.packaged import COMPUTES_NO_LSE, UNIFORM_BATCH, LibraryKernel, declared
from mla_conformance.backends.platform import FROM_AMPERE
from mla_conformance.backends.selected import Selected, SelectedKeysBackend


class AiterTritonSparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of slots; a program for each query token and 16 heads."""

    name = "AITER_TRITON_SPARSE"
    libraries = (aiter_library("unified_attention_sparse_mla"),)
    devices = FROM_AMPERE  # what Triton compiles for
    supported_block_sizes = PAGES
    supported_calls = ["decode"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64), (256, 64)]
    supported_heads = [16 * tiles for tiles in range(1, 9)]
    returns_lse = False
    cudagraph_support = UNIFORM_BATCH
    declaration = declared(
        "amd-aiter triton",
        COMPUTES_NO_LSE,
        ("computes whole tiles of 16 heads", "other numbers are declared unsupported"),
        ("wants columns of queries and lists without gaps", "copies others"),
        ("a list that names no key makes its row NaN, as its source says", "0 in such rows"),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (listed,), metadata = sources, self._sparse_metadata
        indices, output = listed.indices.contiguous(), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        self.library.unified_attention_sparse_mla(
            q=q.contiguous(),
            kv=listed.cache.unsqueeze(2),
            out=output,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            topk_indices=indices,
            block_table=metadata.block_table,
            kv_lora_rank=self.kv_lora_rank,
        )
        return output.masked_fill_((indices < 0).all(dim=1)[:, None, None], 0.0), None


AiterTritonSparseInterpreted = interpreted(AiterTritonSparseBackend, InterpretedAiter)
