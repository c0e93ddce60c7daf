"""SGLANG_TRITON_SPARSE: SGLang 0.5.23's Triton kernel of sparse prefills; variants share keys between 2 or 4 rows."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.sglang_triton import sglang_library


class SGLangTritonSparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "SGLANG_TRITON_SPARSE"
    libraries = (sglang_library("attention.dsa.triton_sparse_mla_prefill"),)
    devices = packaged.FROM_HOPPER  # as its description says
    union: ClassVar[int] = 0
    supported_calls = ["prefill"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "sglang triton", packaged.COMPUTES_NO_LSE, ("wants contiguous tensors", "the library itself copies others")
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        operands = (q, sources[0].cache, sources[0].indices, self.scale, self.kv_lora_rank)
        return self.library.sparse_mla_prefill(*operands, topk_length=sources[0].length, union=self.union), None


# Rows share their keys; what that path does not take the launcher would serve without it, and say nothing.
_UNION2 = SGLangTritonSparseBackend.also(
    "union2",
    ("counts a key that a list names twice once", "declared unsupported"),
    ("does not look at lengths beside the lists", "declared unsupported"),
    ("serves other numbers of heads and columns without sharing", "declared unsupported"),
    ("serves the rows left over of a batch without sharing", "left to the library"),
    union=2,
    supported_heads=[8, 16],
    supported_topk=[1 << exponent for exponent in range(12)],
    supports_topk_length=False,
    supports_duplicates=False,
)
_UNION2.also("union4", union=4, supported_heads=[4, 8])


def _launch(self: Any, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
    (gathered,), library, heads = sources, self.library, self.num_heads
    indices, columns = gathered.indices.contiguous(), gathered.indices.shape[1]
    output = q.new_empty(*q.shape[:2], self.kv_lora_rank)
    length = library._topk_length(indices, columns) if gathered.length is None else gathered.length
    sizes = {"H": heads, "BLOCK_H": max(16, 1 << (heads - 1).bit_length()), "BLOCK_N": 64, "IDX64": False}
    sizes |= {"D_QK": q.shape[2], "D_V": self.kv_lora_rank}
    operands = (q.contiguous(), gathered.cache.contiguous(), indices, length, output, self.scale, columns)
    library._sparse_mla_prefill_kernel[(len(q),)](*operands, **sizes)
    return output, None


packaged.interpreted(
    SGLangTritonSparseBackend,
    attend=_launch,
    declaration=packaged.declared(
        "sglang triton",
        ("the launcher takes bfloat16 alone, the interpreter all else", "launches the kernel itself"),
        *SGLangTritonSparseBackend.declaration.deviations,
    ),
)
