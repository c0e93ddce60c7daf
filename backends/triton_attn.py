"""TRITON_ATTN: vLLM's Triton kernel for paged attention, on the new tokens of a prefill; its e4m3 output is fused.

Written for vLLM 0.33.0, ``unified_attention`` as ``vllm/v1/attention/backends/triton_attn.py`` calls it. It returns no
LSE, so that it can serve neither a context chunk nor new tokens behind a context.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, pad_head_dim
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.platform import FROM_ADA, Devices
from mla_conformance.backends.quant_key import QuantKey, fp8_static_tensor_sym
from mla_conformance.backends.ragged import RaggedOutputBackend
from mla_conformance.reference.dimensions import MLADimensions

_LIBRARY = Library("vllm.v1.attention.ops.triton_unified_attention", "vllm", extra("vllm"))
_PAGE = 16
_LEAST_HEAD_DIM = 32


class TritonAttnPrefillBackend(RaggedOutputBackend):
    """New tokens whose LSE nobody needs."""

    name: ClassVar[str] = "TRITON_ATTN"
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    devices: ClassVar[Devices] = FROM_ADA  # where Triton converts to e4m3
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "triton"),
        deviations=(
            Deviation("reads keys and values of pages", "copies them into pages of 16 tokens"),
            Deviation("wants V as wide as K", "V is padded with zeros, and the result cut"),
            Deviation("returns no LSE", "declared unsupported, context chunks with it"),
            Deviation(
                "e4m3 output: times the reciprocal of the scale, clamped at ±448, rounded to nearest even", "as it is"
            ),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Head dims that vLLM's backend accepts; V can be padded and not cut."""
        return dimensions.v_head_dim <= dimensions.qk_head_dim and dimensions.qk_head_dim >= _LEAST_HEAD_DIM

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Static e4m3, one scale for the tensor."""
        return quant_key == fp8_static_tensor_sym()

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, dtype: torch.dtype, output_scale: Tensor | None
    ) -> Tensor:
        """See :class:`RaggedOutputBackend`."""
        table, slots = _pages(batch.query_lens, q.device)
        width = q.shape[-1]
        keys, values = (_paged(x, slots, table.numel()) for x in (k, pad_head_dim(v, width)))
        wide = q.new_empty(q.shape, dtype=dtype)
        self.library.unified_attention(
            q=q.contiguous(),
            k=keys,
            v=values,
            out=wide,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.query_start_loc.diff(),
            max_seqlen_k=batch.max_key_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            output_scale=output_scale,
        )
        return wide[..., : self.v_head_dim]


def _pages(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Block table [B, pages of the longest] int32 of requests with their own pages, and the slot of each token."""
    pages = -(-max(lengths) // _PAGE)
    table = torch.arange(len(lengths) * pages, dtype=torch.int32).view(len(lengths), pages)
    slots = torch.cat([torch.arange(length) + request * pages * _PAGE for request, length in enumerate(lengths)])
    return table.to(device), slots.to(device)


def _paged(x: Tensor, slots: Tensor, pages: int) -> Tensor:
    """``x`` [tokens, N, D] as [pages, 16, N, D]."""
    stored = x.new_zeros(pages * _PAGE, *x.shape[1:])
    stored[slots] = x
    return stored.view(pages, _PAGE, *x.shape[1:])
