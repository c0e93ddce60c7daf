"""TORCH_SDPA over gathered keys: PyTorch's own kernels that return the LSE, with every row a batch entry of one head.

Its rows are the N query heads, against the keys of its own. Keys and values are one tensor: a key's first L columns are
its value. All of it is tensor operations of fixed shapes without a synchronisation.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.kernel import NamedKernel
from mla_conformance.backends.packaged import DeviceCapability, LseClass, Precision, Rounding

MASK_ALIGNMENT = 16
"""Keys of a row are a multiple of this, for kernels that load masks in vectors."""
_GATHERED_ELEMENTS = 2**28
"""Elements of keys that are gathered at once: half a GiB of 16 bits."""
APPROXIMATE = Rounding(lse=LseClass.APPROXIMATE_EXP, dequantised_keys=Precision.MODEL)
APPROXIMATE_EXP = ("16-bit operands: a vectorised exp with errors to 6e-5, LSE included", "declared approximate-exp")
EFFICIENT = (
    ("the LSE is padded to a multiple of 32 rows", "cut off"),
    ("a row without keys holds anything", "such a row is blanked: output 0, LSE -inf"),
)


class TorchRows(NamedKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; on a GPU another kernel serves the calls."""

    name = "TORCH_SDPA"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    kernel: ClassVar[str] = "CPU flash attention"  # which of PyTorch's it is, for the evidence
    num_heads: int
    scale: float
    kv_lora_rank: int

    def kernel_evidence(self) -> dict[str, str]:
        return {"torch": torch.__version__, "kernel": self.kernel}

    def attend_in_parts(
        self, q: Tensor, columns: int, keys_of: Callable[[slice], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Attention of each row of q [T, N, D] to those of its own keys that it sees.

        ``keys_of`` some rows at a time are ``columns`` of each, [T, S, D] of the query's dtype, and which of them it
        sees, [T, S] bool. Returns output [T, N, L] and lse [N, T] float32, natural; without keys 0 and -inf.
        """
        step = max(1, _GATHERED_ELEMENTS // (columns * q.shape[2]))
        outputs, lses = [], []
        for start in range(0, max(1, len(q)), step):
            rows = slice(start, start + step)
            keys, visible = keys_of(rows)
            # What no row may see must not be multiplied by a weight of 0: it may be NaN.
            keys = keys.masked_fill(~visible.unsqueeze(-1), 0.0).unsqueeze(1)
            mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
            mask = mask[:, None, None].expand(-1, 1, self.num_heads, -1)
            output, lse = self._attend(q[rows].unsqueeze(1), keys, mask)
            empty = ~visible.any(dim=1)
            outputs.append(output[:, 0, :, : self.kv_lora_rank].masked_fill(empty[:, None, None], 0.0))
            lses.append(lse[:, 0, : self.num_heads].mT.masked_fill(empty, -torch.inf))
        return torch.cat(outputs), torch.cat(lses, dim=1)

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Output [T, 1, N, D] and LSE [T, 1, at least N] of q [T, 1, N, D] and keys [T, 1, S, D]."""
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, keys, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return output, lse


class TorchEfficientRows(TorchRows):
    """``aten::_scaled_dot_product_efficient_attention`` with its LSE."""

    variant: ClassVar[str] = "efficient"
    kernel = "efficient attention"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        return device_capability is not None

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            aligned(q), keys, keys, mask, True, 0.0, False, scale=self.scale
        )
        return output, lse
