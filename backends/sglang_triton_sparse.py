"""SGLANG_TRITON_SPARSE: SGLang's Triton kernel of sparse prefills, over gathered keys.

Written for SGLang 0.5.23. The variants share a gathered set of keys between 2 or 4 neighbouring rows.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import FROM_HOPPER, Devices
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_LIBRARY = Library("sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill", "sglang", extra("sglang"))
_ROWS_OF_A_TILE = (16, 32)
_POWERS_OF_TWO: list[int | MultipleOf] = [1 << exponent for exponent in range(12)]


class SGLangTritonSparseBackend(LibraryKernel, SelectedKeysBackend):
    """A program for each query token, any number of heads."""

    name: ClassVar[str] = "SGLANG_TRITON_SPARSE"
    union: ClassVar[int] = 0
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    devices: ClassVar[Devices] = FROM_HOPPER  # as its description says
    supported_calls: ClassVar[list[str]] = ["prefill"]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supports_topk_length: ClassVar[bool] = True
    returns_lse: ClassVar[bool] = False
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("sglang", "triton"),
        deviations=(
            Deviation("computes no LSE", "declared unsupported"),
            Deviation("wants contiguous tensors", "the library itself copies others"),
        ),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        """See :class:`SelectedKeysBackend`."""
        (gathered,) = sources
        output = self.library.sparse_mla_prefill(
            q,
            gathered.cache,
            gathered.indices,
            self.scale,
            self.kv_lora_rank,
            topk_length=gathered.length,
            union=self.union,
        )
        return output, None


class _Union(SGLangTritonSparseBackend):
    """What the launcher's shared path takes; it would serve all else by the path above, and say nothing."""

    supported_topk: ClassVar[list[int | MultipleOf]] = _POWERS_OF_TWO
    supports_topk_length: ClassVar[bool] = False
    supports_duplicates: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        distributions=SGLangTritonSparseBackend.declaration.distributions,
        deviations=(
            *SGLangTritonSparseBackend.declaration.deviations,
            Deviation("counts a key that a list names twice once", "declared unsupported"),
            Deviation("does not look at lengths beside the lists", "declared unsupported"),
            Deviation("serves other numbers of heads and columns without sharing", "declared unsupported"),
            Deviation("serves the rows left over of a batch without sharing", "left to the library"),
        ),
    )


class SGLangTritonSparseUnion2(_Union):
    """Two rows share their keys."""

    variant: ClassVar[str] = "union2"
    union: ClassVar[int] = 2
    supported_heads: ClassVar[list[int]] = [rows // 2 for rows in _ROWS_OF_A_TILE]


class SGLangTritonSparseUnion4(_Union):
    """Four rows share their keys."""

    variant: ClassVar[str] = "union4"
    union: ClassVar[int] = 4
    supported_heads: ClassVar[list[int]] = [rows // 4 for rows in _ROWS_OF_A_TILE]


_LAUNCHED = Deviation("the launcher takes bfloat16 alone, the interpreter all else", "launches the kernel itself")
_SMALLEST_TILE, _KEYS_OF_A_TILE = 16, 64


class SGLangTritonSparseInterpreted(InterpretedKernel, SGLangTritonSparseBackend):
    """The same source by Triton's interpreter."""

    declaration: ClassVar[Declaration] = Declaration(
        distributions=SGLangTritonSparseBackend.declaration.distributions,
        deviations=(_LAUNCHED, *SGLangTritonSparseBackend.declaration.deviations),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        """As the launcher does."""
        (gathered,), library = sources, self.library
        q, indices, columns = q.contiguous(), gathered.indices.contiguous(), gathered.indices.shape[1]
        output = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        library._sparse_mla_prefill_kernel[(len(q),)](
            q,
            gathered.cache.contiguous(),
            indices,
            library._topk_length(indices, columns) if gathered.length is None else gathered.length,
            output,
            self.scale,
            columns,
            H=self.num_heads,
            BLOCK_H=max(_SMALLEST_TILE, 1 << (self.num_heads - 1).bit_length()),
            D_QK=q.shape[2],
            D_V=self.kv_lora_rank,
            BLOCK_N=_KEYS_OF_A_TILE,
            IDX64=False,
        )
        return output, None
