"""TORCH_SDPA: PyTorch's own CPU flash kernel, the one that also returns the LSE.

As measured of torch 2.13 it masks top-left, and an empty sequence kills the process; LSE natural, float32, [B, N, T].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, pad_head_dim
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.backends.torch_rows import APPROXIMATE_EXP


class TorchSDPAPrefillBackend(RaggedPrefillBackend):
    name = "TORCH_SDPA"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = packaged.CPU_ALONE
    of_torch = {"torch": torch.__version__}
    declaration = packaged.declared(
        "torch",
        ("needs equal head dims of q, k and v", "pads the narrower ones with zeros, slices the output"),
        ("dies with SIGFPE on an empty sequence", "such a request is not launched: output 0, LSE -inf"),
        ("causal mask aligned top-left", "an additive bottom-right mask where the lengths differ"),
        packaged.NO_OUT,
        APPROXIMATE_EXP,
        rounding=packaged.Rounding(lse=packaged.LseClass.APPROXIMATE_EXP),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        output = q.new_zeros(q.shape[0], self.num_heads, self.v_head_dim)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        for rows, keys in batch.requests():
            queries, seen, mask = rows.stop - rows.start, keys.stop - keys.start, None
            if batch.causal and queries > seen:
                # Queries before the first key see nothing; the kernel would give them the LSE of an unmasked row.
                rows, queries = slice(rows.stop - seen, rows.stop), seen
            parts = (q[rows], k[keys], v[keys])
            width = max(x.shape[-1] for x in parts)
            operands = [pad(x, (0, width - x.shape[-1])).transpose(0, 1).unsqueeze(0) for x in parts]
            if batch.causal and queries != seen:  # aligned bottom-right: query i sees keys 0 ... S - T + i
                visible = torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)
                mask = torch.zeros(queries, seen).masked_fill(~visible, -torch.inf)
            call, masks = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, batch.causal and mask is None
            result, logsumexp = call(*operands, 0.0, masks, attn_mask=mask, scale=self.scale)
            output[rows], lse[:, rows] = result[0].transpose(0, 1)[..., : v.shape[-1]], logsumexp[0]
        return output, lse


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
