"""TORCH_SDPA[efficient]: the CUTLASS kernel inside PyTorch that its memory-efficient attention runs.

Conventions of ``aten::_efficient_attention_forward`` with offsets, in torch 2.11: operands are [1, tokens, N, D], the
value may be narrower than the key, and the LSE is natural, float32, [B, N, longest query rounded up to 32].
"""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, pad_head_dim
from mla_conformance.backends.ragged import RaggedPrefillBackend

_NO_MASK, _BOTTOM_RIGHT = 0, 2


class TorchEfficientPrefillBackend(RaggedPrefillBackend):
    name = "TORCH_SDPA"
    variant = "efficient"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = packaged.FROM_AMPERE  # where bfloat16 is
    blanks = ("output", "lse")
    of_torch = {"torch": torch.__version__, "operator": "aten::_efficient_attention_forward"}
    declaration = packaged.declared(
        "torch",
        ("a row without keys is never written, output and LSE", "0 and -inf where the lengths say so"),
        ("LSE [B, N, longest query], padded to a multiple of 32", "the rows that count are gathered"),
        ("rows that do not fill multiples of 16 bytes", "are padded with zeros, the output is sliced"),
        ("refuses rows that do not start at multiples of 16 bytes", "such operands are copied"),
        packaged.NO_OUT,
    )

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        return [] if torch.backends.cuda.is_built() else [f"torch {torch.__version__} is built without CUDA"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit, mask = ALIGNMENT // q.element_size(), _BOTTOM_RIGHT if batch.causal else _NO_MASK
        operands = [aligned(pad_head_dim(x, -(-x.shape[-1] // unit) * unit)).unsqueeze(0) for x in (q, k, v)]
        call = torch.ops.aten._efficient_attention_forward
        output, lse, *_ = call(*operands, None, *batch.lengths, 0.0, mask, True, scale=self.scale)
        return output[0, ..., : self.v_head_dim], batch.rows_that_count(lse.mT)
