"""SGLANG_TRITON_SPARSE: SGLang's Triton kernel of sparse prefills, over gathered keys.

Written for SGLang 0.5.23. The variants share a gathered set of keys between 2 or 4 neighbouring rows.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.interpreted import interpreted
from mla_conformance.backends.packaged import COMPUTES_NO_LSE, UNIFORM_BATCH, LibraryKernel, declared, further
from mla_conformance.backends.platform import FROM_HOPPER
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_MODULE = "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill"
_POWERS_OF_TWO: list[int | MultipleOf] = [1 << exponent for exponent in range(12)]


class SGLangTritonSparseBackend(LibraryKernel, SelectedKeysBackend):
    """A program for each query token, any number of heads."""

    name = "SGLANG_TRITON_SPARSE"
    libraries = (Library(_MODULE, "sglang", extra("sglang")),)
    devices = FROM_HOPPER  # as its description says
    union: ClassVar[int] = 0
    supported_calls = ["prefill"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = UNIFORM_BATCH
    declaration = declared(
        "sglang triton", COMPUTES_NO_LSE, ("wants contiguous tensors", "the library itself copies others")
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (gathered,) = sources
        operands = (q, gathered.cache, gathered.indices, self.scale, self.kv_lora_rank)
        return self.library.sparse_mla_prefill(*operands, topk_length=gathered.length, union=self.union), None


class SGLangTritonSparseUnion2(SGLangTritonSparseBackend, variant="union2"):
    """Two rows share their keys; what that path does not take the launcher would serve without it, and say nothing."""

    union = 2
    supported_heads = [8, 16]
    supported_topk = _POWERS_OF_TWO
    supports_topk_length = False
    supports_duplicates = False
    declaration = further(
        SGLangTritonSparseBackend.declaration,
        ("counts a key that a list names twice once", "declared unsupported"),
        ("does not look at lengths beside the lists", "declared unsupported"),
        ("serves other numbers of heads and columns without sharing", "declared unsupported"),
        ("serves the rows left over of a batch without sharing", "left to the library"),
    )


class SGLangTritonSparseUnion4(SGLangTritonSparseUnion2, variant="union4"):
    """Four rows share their keys."""

    union = 4
    supported_heads = [4, 8]


def _launch(self: Any, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
    (gathered,), library, heads = sources, self.library, self.num_heads
    q, indices, columns = q.contiguous(), gathered.indices.contiguous(), gathered.indices.shape[1]
    output = q.new_empty(*q.shape[:2], self.kv_lora_rank)
    length = library._topk_length(indices, columns) if gathered.length is None else gathered.length
    sizes = {"H": heads, "BLOCK_H": max(16, 1 << (heads - 1).bit_length()), "BLOCK_N": 64}
    sizes |= {"D_QK": q.shape[2], "D_V": self.kv_lora_rank, "IDX64": False}
    operands = (q, gathered.cache.contiguous(), indices, length, output, self.scale, columns)
    library._sparse_mla_prefill_kernel[(len(q),)](*operands, **sizes)
    return output, None


SGLangTritonSparseInterpreted = interpreted(
    SGLangTritonSparseBackend,
    attend=_launch,
    declaration=declared(
        "sglang triton",
        ("the launcher takes bfloat16 alone, the interpreter all else", "launches the kernel itself"),
        *SGLangTritonSparseBackend.declaration.deviations,
    ),
)
