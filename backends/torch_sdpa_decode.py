"""TORCH_SDPA, decode: PyTorch's own kernels that return the LSE, over latents gathered from the pages.

Every query token is a batch entry with one head whose rows are the N query heads, against the tokens of its request.
Gather and mask are tensor operations of fixed shapes without a synchronisation, so a call may be captured in a CUDA
graph whose buffers change later. Keys and values are one tensor: a latent's first L columns are its value.
"""

from typing import ClassVar

import torch

from mla_conformance.backends.checks import check_decode_operands
from mla_conformance.backends.declaration import Declaration, Deviation, LseClass, Precision, Rounding
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.latent_entries import dequantise
from mla_conformance.backends.platform import DeviceCapability

_ALIGNMENT = 16
"""Keys of a call are a multiple of this, for kernels that load masks in vectors."""

_ADAPTED = (
    Deviation("no paged cache", "gathers the pages of every query token's request; ids past the last page are clamped"),
    Deviation("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
    Deviation("causal mask aligned top-left", "an additive mask from the positions in the sequence"),
)


class TorchSDPADecodeBackend(MLADecodeBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; on a GPU another kernel serves the calls."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    supports_causal_dcp: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=Rounding(lse=LseClass.APPROXIMATE_EXP, dequantised_keys=Precision.MODEL),
        deviations=(
            *_ADAPTED,
            Deviation(
                "a row without keys is NaN, and a batch without any ends the process",
                "a call has masked keys at least; such a row is blanked: output 0, LSE -inf",
            ),
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
    def resolve(cls, device_capability: DeviceCapability | None) -> type["TorchSDPADecodeBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientDecodeBackend

    def kernel_evidence(self) -> dict[str, str]:
        """PyTorch's version, and which of its kernels serves the calls."""
        kernel = "efficient attention" if isinstance(self, TorchEfficientDecodeBackend) else "CPU flash attention"
        return {"torch": torch.__version__, "kernel": kernel}

    def run_decode(
        self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`MLADecodeBackend`."""
        metadata = self._decode_metadata
        check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        request, last = _last_positions(metadata, ql_nope.shape[0])
        rows = _gather(metadata, kv_cache, request)
        visible = _positions(metadata, rows.shape[1]) <= last.unsqueeze(1)
        keys = dequantise(rows, self.kv_cache_dtype, k_scale, ql_nope.dtype)
        keys = keys[..., : self.kv_lora_rank + self.qk_rope_head_dim]
        # What no query may see must not be multiplied by a weight of 0: it may be NaN.
        keys = keys.masked_fill(~visible.unsqueeze(-1), 0.0).to(ql_nope.dtype).unsqueeze(1)
        mask = torch.zeros_like(visible, dtype=ql_nope.dtype).masked_fill(~visible, -torch.inf)
        q = torch.cat((ql_nope, q_pe), dim=-1).unsqueeze(1)
        output, lse = self._attend(q, keys, mask[:, None, None].expand(-1, 1, self.num_heads, -1))
        empty = ~visible.any(dim=1)
        output = output[:, 0, :, : self.kv_lora_rank].masked_fill(empty[:, None, None], 0.0)
        return output, lse[:, 0, : self.num_heads].mT.masked_fill(empty, -torch.inf)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, 1, N, L + R] and LSE [T, 1, at least N] of q [T, 1, N, L + R] and keys [T, 1, S, L + R]."""
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, keys, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return output, lse


class TorchEfficientDecodeBackend(TorchSDPADecodeBackend):
    """``aten::_scaled_dot_product_efficient_attention`` with its LSE.

    Attributes:
        variant: the name in brackets by which it is chosen.
    """

    variant: ClassVar[str] = "efficient"
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=Rounding(dequantised_keys=Precision.MODEL),
        deviations=(
            *_ADAPTED,
            Deviation("the LSE is padded to a multiple of 32 rows", "cut off"),
            Deviation("a row without keys holds anything", "such a row is blanked: output 0, LSE -inf"),
        ),
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Any GPU."""
        return device_capability is not None

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`TorchSDPADecodeBackend`."""
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, keys, keys, mask, True, 0.0, False, scale=self.scale
        )
        return output, lse


def _last_positions(metadata: MLACommonDecodeMetadata, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] request of each query token, and the last position in the whole sequence that it sees; -1 for none."""
    starts = metadata.query_start_loc
    token = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    request = torch.searchsorted(starts[1:], token, right=True).clamp(max=starts.shape[0] - 2)
    totals = metadata.seq_lens if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
    last = totals[request] - starts[1:][request] + token
    return request, last.masked_fill(token >= starts[-1], -1)


def _gather(metadata: MLACommonDecodeMetadata, kv_cache: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """[T, S, width] entries of each query token's request; past its last token, whatever the clamped ids lead to."""
    page, columns = kv_cache.shape[1], metadata.block_table.shape[1]
    tokens = max(1, min(metadata.max_seq_len, columns * page))
    tokens += -tokens % _ALIGNMENT
    position = torch.arange(tokens, device=kv_cache.device)
    blocks = metadata.block_table[:, (position // page).clamp(max=columns - 1)]
    blocks = blocks.long().clamp(0, kv_cache.shape[0] - 1)
    # As bytes, since float8 cannot be indexed everywhere.
    rows = kv_cache.view(torch.uint8)[blocks[request], position % page]
    return rows.view(kv_cache.dtype)


def _positions(metadata: MLACommonDecodeMetadata, tokens: int) -> torch.Tensor:
    """[S] positions in the whole sequence of the tokens that this rank holds."""
    local = torch.arange(tokens, device=metadata.seq_lens.device)
    interleave = metadata.cp_kv_cache_interleave_size
    shares = local // interleave * metadata.dcp_world_size + metadata.dcp_rank
    return shares * interleave + local % interleave
