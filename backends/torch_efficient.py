"""TORCH_SDPA[efficient]: the CUTLASS kernel inside PyTorch that its memory-efficient attention runs.

Conventions of ``aten::_efficient_attention_forward`` with offsets, in torch 2.11: operands are [1, tokens, N, D], the
value may be narrower than the key, and the LSE is natural, float32, [B, N, longest query rounded up to 32].
"""

import torch
from torch import Tensor

from mla_conformance.backends.conversions import (
    ALIGNMENT,
    RaggedBatch,
    aligned,
    blank_lse,
    blank_output,
    pad_head_dim,
    rows_that_count,
)
from mla_conformance.backends.packaged import NO_OUT, declared
from mla_conformance.backends.platform import FROM_AMPERE
from mla_conformance.backends.ragged import RaggedPrefillBackend

_NO_MASK, _BOTTOM_RIGHT = 0, 2


class TorchEfficientPrefillBackend(RaggedPrefillBackend):
    """One call a batch; nothing to install, and float32 as well."""

    name = "TORCH_SDPA"
    variant = "efficient"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = FROM_AMPERE  # where bfloat16 is
    declaration = declared(
        "torch",
        ("a row without keys is never written, output and LSE", "0 and -inf where the lengths say so"),
        ("LSE [B, N, longest query], padded to a multiple of 32", "the rows that count are gathered"),
        ("rows that do not fill multiples of 16 bytes", "are padded with zeros, the output is sliced"),
        ("refuses rows that do not start at multiples of 16 bytes", "such operands are copied"),
        NO_OUT,
    )

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """A torch built without CUDA has no such kernel."""
        return [] if torch.backends.cuda.is_built() else [f"torch {torch.__version__} is built without CUDA"]

    def kernel_evidence(self) -> dict[str, str]:
        operator = "aten::_efficient_attention_forward"
        return {"torch": torch.__version__, "operator": operator, **super().kernel_evidence()}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit = ALIGNMENT // q.element_size()
        operands = [aligned(pad_head_dim(x, -(-x.shape[-1] // unit) * unit)).unsqueeze(0) for x in (q, k, v)]
        lengths = (batch.query_start_loc, batch.key_start_loc, batch.max_query_len, batch.max_key_len)
        mask = _BOTTOM_RIGHT if batch.causal else _NO_MASK
        output, lse, *_ = torch.ops.aten._efficient_attention_forward(
            *operands, None, *lengths, 0.0, mask, True, scale=self.scale
        )
        output = blank_output(output[0, ..., : self.v_head_dim], batch)
        return output, blank_lse(rows_that_count(lse.mT, batch), batch)
