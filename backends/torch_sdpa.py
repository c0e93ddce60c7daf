"""TORCH_SDPA: PyTorch's own CPU flash kernel, the one that also returns the LSE.

Conventions of ``aten::_scaled_dot_product_flash_attention_for_cpu`` in torch 2.13, each measured: query, key and
value need one head dim; its causal mask is aligned top-left; an empty key or query sequence kills the process
(SIGFPE); the LSE is natural, float32, [B, N, T].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch
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
            result, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *operands, 0.0, batch.causal and mask is None, attn_mask=mask, scale=self.scale
            )
            output[rows], lse[:, rows] = result[0].transpose(0, 1)[..., : v.shape[-1]], logsumexp[0]
        return output, lse
