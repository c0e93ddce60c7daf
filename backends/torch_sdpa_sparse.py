"""TORCH_SDPA, sparse: PyTorch's own kernels that return the LSE, over the entries that each row's lists name.

Every row is a batch entry with one head whose rows are the N query heads, against the columns of its lists. Keys and
values are one tensor: a key's first L columns are its value.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation, LseClass, Precision, Rounding
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.sparse_checks import listed
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS

_GATHERED_ELEMENTS = 2**28
"""Elements of keys that are gathered at once: half a GiB of 16 bits."""
_ALIGNMENT = 16
"""Columns of lists that are a multiple of this suit a kernel that loads masks in vectors."""

_ADAPTED = (
    Deviation("no lists", "gathers the named entries of every query token; a column that names none is masked"),
    Deviation("no cache of codes", "dequantises with the scales in float32 and rounds to the model's dtype"),
    Deviation("no second cache", "its keys stand behind those of the first"),
)


class TorchSDPASparseBackend(SelectedKeysBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; on a GPU another kernel serves the calls."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_LAYOUTS)
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_LAYOUTS)
    supports_topk_length: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=Rounding(lse=LseClass.APPROXIMATE_EXP, dequantised_keys=Precision.MODEL),
        deviations=(
            *_ADAPTED,
            Deviation("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
            Deviation(
                "16-bit operands: a vectorised exp with errors to 6e-5, LSE included", "declared approximate-exp"
            ),
        ),
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "TORCH_SDPA"

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type["TorchSDPASparseBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientSparseBackend

    def kernel_evidence(self) -> dict[str, str]:
        """PyTorch's version, and which of its kernels serves the calls."""
        kernel = "efficient attention" if isinstance(self, TorchEfficientSparseBackend) else "CPU flash attention"
        return {"torch": torch.__version__, "kernel": kernel}

    def attend(
        self, q: torch.Tensor, sources: list[Selected], k_scale: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`SelectedKeysBackend`."""
        parts = [self._rows(q[rows], [x.rows(rows) for x in sources], k_scale) for rows in _parts(q, sources)]
        outputs, lses = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(lses, dim=1)

    def _rows(
        self, q: torch.Tensor, sources: list[Selected], k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, N, L] and LSE [N, T] of some rows."""
        visible = torch.cat([listed(source.indices, source.length) for source in sources], dim=1)
        keys = torch.cat([self._keys(source, k_scale, q.dtype) for source in sources], dim=1)
        # What no row may see must not be multiplied by a weight of 0: it may be NaN.
        keys = keys.masked_fill(~visible.unsqueeze(-1), 0.0).unsqueeze(1)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
        output, lse = self._attend(q.unsqueeze(1), keys, mask[:, None, None].expand(-1, 1, self.num_heads, -1))
        empty = ~visible.any(dim=1)
        output = output[:, 0, :, : self.kv_lora_rank].masked_fill(empty[:, None, None], 0.0)
        return output, lse[:, 0, : self.num_heads].mT.masked_fill(empty, -torch.inf)

    def _keys(self, source: Selected, k_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, K, D] in the model's dtype; anything where a list names none."""
        slots = source.indices.masked_fill(~listed(source.indices, source.length), 0).long()
        keys = dequantise(gather(source.cache, slots, source.layout), source.layout, k_scale, dtype)
        return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim].to(dtype)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, 1, N, D] and LSE [T, 1, at least N] of q [T, 1, N, D] and keys [T, 1, K, D]."""
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, keys, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return output, lse


class TorchEfficientSparseBackend(TorchSDPASparseBackend):
    """``aten::_scaled_dot_product_efficient_attention`` with its LSE.

    Attributes:
        variant: the name in brackets by which it is chosen.
    """

    variant: ClassVar[str] = "efficient"
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(_ALIGNMENT)]
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=Rounding(dequantised_keys=Precision.MODEL),
        deviations=(
            *_ADAPTED,
            Deviation("wants rows that start at multiples of 16 bytes", "other queries are copied"),
            Deviation("the LSE is padded to a multiple of 32 rows", "cut off"),
            Deviation("a row without keys holds anything", "such a row is blanked: output 0, LSE -inf"),
        ),
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Any GPU."""
        return device_capability is not None

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`TorchSDPASparseBackend`."""
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            aligned(q), keys, keys, mask, True, 0.0, False, scale=self.scale
        )
        return output, lse


def _parts(q: torch.Tensor, sources: list[Selected]) -> Iterator[slice]:
    """Rows whose keys are gathered at once."""
    columns = sum(source.indices.shape[1] for source in sources)
    step = max(1, _GATHERED_ELEMENTS // (columns * q.shape[2]))
    return (slice(start, min(start + step, len(q))) for start in range(0, len(q), step))
