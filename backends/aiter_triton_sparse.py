"""AITER_TRITON_SPARSE: AITER's Triton kernel of sparse MLA over a paged cache, which runs on NVIDIA's GPUs as well.

Written for ROCm/aiter at e4048607, ``aiter/ops/triton/attention/unified_attention_sparse_mla.py``.
"""

from typing import ClassVar

import torch

from mla_conformance.backends.aiter_triton import DISTRIBUTIONS, PAGES, aiter_library, interpreted_aiter
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel, interpreted_declaration
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_MODULE = "unified_attention_sparse_mla"
_HEADS_OF_A_TILE = 16


class AiterTritonSparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of slots; a program for each query token and 16 heads."""

    libraries: ClassVar[tuple[Library, ...]] = (aiter_library(_MODULE),)
    needed_capability: ClassVar[str] = "8.0 or newer"
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

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "AITER_TRITON_SPARSE"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Of a cache; as many entries of a list are a tile."""
        return PAGES

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """What Triton compiles for."""
        return device_capability is not None and device_capability >= (8, 0)

    def attend(
        self, q: torch.Tensor, sources: list[Selected], k_scale: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """See :class:`SelectedKeysBackend`."""
        (listed,), metadata = sources, self._sparse_metadata
        indices, output = listed.indices.contiguous(), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        self.libraries[0].load().unified_attention_sparse_mla(
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


class AiterTritonSparseInterpreted(InterpretedKernel, AiterTritonSparseBackend):
    """The same source by Triton's interpreter."""

    libraries: ClassVar[tuple[Library, ...]] = (interpreted_aiter(_MODULE),)
    declaration: ClassVar[Declaration] = interpreted_declaration(AiterTritonSparseBackend.declaration)
