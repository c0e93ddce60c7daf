"""TORCH_SDPA: PyTorch's own CPU flash kernel, the one that also returns the LSE.

Conventions of ``aten::_scaled_dot_product_flash_attention_for_cpu`` in torch 2.13, each measured: query, key and
value need one head dim; its causal mask is aligned top-left; an empty key or query sequence kills the process
(SIGFPE); the LSE is natural, float32, [B, N, T].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.declaration import LseClass, Rounding
from mla_conformance.backends.packaged import NO_OUT, declared
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.backends.torch_rows import APPROXIMATE_EXP


class TorchSDPAPrefillBackend(RaggedPrefillBackend):
    """One kernel call per request that has queries and keys."""

    name = "TORCH_SDPA"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    declaration = declared(
        "torch",
        ("needs equal head dims of q, k and v", "pads the narrower ones with zeros, slices the output"),
        ("dies with SIGFPE on an empty sequence", "such a request is not launched: output 0, LSE -inf"),
        ("causal mask aligned top-left", "an additive bottom-right mask where the lengths differ"),
        NO_OUT,
        APPROXIMATE_EXP,
        rounding=Rounding(lse=LseClass.APPROXIMATE_EXP),
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """A CPU kernel: only devices without compute capability."""
        return device_capability is None

    def kernel_evidence(self) -> dict[str, str]:
        """PyTorch's version."""
        return {"torch": torch.__version__, **super().kernel_evidence()}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        output = q.new_zeros(q.shape[0], self.num_heads, self.v_head_dim)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        for rows, keys in batch.requests():
            flash_attention(q[rows], k[keys], v[keys], output[rows], lse[:, rows], self.scale, batch.causal)
        return output, lse


def flash_attention(q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scale: float, causal: bool) -> None:
    """Attend to one request's keys and write ``output`` and ``lse``; causal masks are aligned bottom-right.

    Args:
        q: [T, N, D], T > 0.
        k: [S, N, D], S > 0.
        v: [S, N, V].
        output: [T, N, V], written where a key is visible.
        lse: [N, T] float32, written where a key is visible.
        scale: softmax scale.
        causal: query i sees keys 0 ... S - T + i.
    """
    # Queries before the first key see nothing; the kernel would give them the LSE of an unmasked row.
    first = max(0, q.shape[0] - k.shape[0]) if causal else 0
    q, output, lse = q[first:], output[first:], lse[:, first:]
    width = max(q.shape[-1], v.shape[-1])
    operands = [pad(x, (0, width - x.shape[-1])).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    queries, keys, mask = q.shape[0], k.shape[0], None
    if causal and queries != keys:
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = torch.zeros(queries, keys).masked_fill(~visible, -torch.inf)
    result, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, causal and mask is None, attn_mask=mask, scale=scale
    )
    output.copy_(result[0].transpose(0, 1)[..., : v.shape[-1]])
    lse.copy_(logsumexp[0])
