"""AITER_TRITON_SPARSE: AITER's Triton kernel of sparse MLA over a paged cache, which runs on NVIDIA's GPUs as well.

Written for ROCm/aiter at e4048607, ``aiter/ops/triton/attention/unified_attention_sparse_mla.py``.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.aiter_triton import DISTRIBUTIONS, PAGES, InterpretedAiter, aiter_library
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import FROM_AMPERE, Devices
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_MODULE = "unified_attention_sparse_mla"
_HEADS_OF_A_TILE = 16


class AiterTritonSparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of slots; a program for each query token and 16 heads."""

    name: ClassVar[str] = "AITER_TRITON_SPARSE"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = PAGES
    libraries: ClassVar[tuple[Library, ...]] = (aiter_library(_MODULE),)
    devices: ClassVar[Devices] = FROM_AMPERE  # what Triton compiles for
    supported_calls: ClassVar[list[str]] = ["decode"]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64), (256, 64)]
    supported_heads: ClassVar[list[int]] = [_HEADS_OF_A_TILE * tiles for tiles in range(1, 9)]
    returns_lse: ClassVar[bool] = False
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        deviations=(
            Deviation("computes no LSE", "declared unsupported"),
            Deviation("computes whole tiles of 16 heads", "other numbers are declared unsupported"),
            Deviation("wants columns of queries and lists without gaps", "copies others"),
            Deviation("a list that names no key makes its row NaN, as its source says", "0 in such rows"),
        ),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        """See :class:`SelectedKeysBackend`."""
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


class AiterTritonSparseInterpreted(InterpretedKernel, AiterTritonSparseBackend, library=InterpretedAiter):
    """The same source by Triton's interpreter."""
