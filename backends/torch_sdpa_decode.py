"""TORCH_SDPA, decode: PyTorch's own kernels that return the LSE, over latents gathered from the pages.

Every query token is a row against the tokens of its request. Gather and mask are tensor operations of fixed shapes
without a synchronisation, so a call may be captured in a CUDA graph whose buffers change later.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.checks import check_decode_operands
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, positions_of
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.latent_entries import dequantise
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.torch_rows import (
    APPROXIMATE,
    APPROXIMATE_EXP,
    EFFICIENT,
    MASK_ALIGNMENT,
    TorchEfficientRows,
    TorchRows,
)

_ADAPTED = (
    Deviation("no paged cache", "gathers the pages of every query token's request; ids past the last page are clamped"),
    Deviation("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
    Deviation("causal mask aligned top-left", "an additive mask from the positions in the sequence"),
)


class TorchSDPADecodeBackend(TorchRows, MLADecodeBackend):
    """On a CPU; on a GPU another kernel serves the calls."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    supports_causal_dcp: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=APPROXIMATE,
        deviations=(
            *_ADAPTED,
            Deviation(
                "a row without keys is NaN, and a batch without any ends the process",
                "a call has masked keys at least; such a row is blanked: output 0, LSE -inf",
            ),
            APPROXIMATE_EXP,
        ),
    )

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type["TorchSDPADecodeBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientDecodeBackend

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`MLADecodeBackend`."""
        metadata = self._decode_metadata
        check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        request, last = _last_positions(metadata, ql_nope.shape[0])
        tokens = _longest(metadata, kv_cache)
        position = torch.arange(tokens, device=kv_cache.device)
        positions = positions_of(metadata, position)

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            entries = _gather(kv_cache, metadata.block_table[request[rows]], position)
            keys = dequantise(entries, self.kv_cache_dtype, k_scale, ql_nope.dtype).to(ql_nope.dtype)
            return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim], positions <= last[rows].unsqueeze(1)

        return self.attend_in_parts(torch.cat((ql_nope, q_pe), dim=-1), tokens, keys_of)


class TorchEfficientDecodeBackend(TorchEfficientRows, TorchSDPADecodeBackend):
    """On a GPU."""

    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",),
        rounding=Rounding(dequantised_keys=Precision.MODEL),
        deviations=(*_ADAPTED, *EFFICIENT),
    )


def _last_positions(metadata: MLACommonDecodeMetadata, tokens: int) -> tuple[Tensor, Tensor]:
    """[T] request of each query token, and the last position in the whole sequence that it sees; -1 for none."""
    starts = metadata.query_start_loc
    token = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    request = torch.searchsorted(starts[1:], token, right=True).clamp(max=starts.shape[0] - 2)
    totals = metadata.seq_lens if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
    last = totals[request] - starts[1:][request] + token
    return request, last.masked_fill(token >= starts[-1], -1)


def _longest(metadata: MLACommonDecodeMetadata, kv_cache: Tensor) -> int:
    """Tokens that are gathered of each request."""
    tokens = max(1, min(metadata.max_seq_len, metadata.block_table.shape[1] * kv_cache.shape[1]))
    return tokens + -tokens % MASK_ALIGNMENT


def _gather(kv_cache: Tensor, block_table: Tensor, position: Tensor) -> Tensor:
    """[T, S, width] entries of each row at positions [S]; past its last token, whatever the clamped ids lead to."""
    page = kv_cache.shape[1]
    blocks = block_table[:, (position // page).clamp(max=block_table.shape[1] - 1)]
    blocks = blocks.long().clamp(0, kv_cache.shape[0] - 1)
    # Float8 as bytes, since it cannot be indexed everywhere.
    entries = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache
    return entries[blocks, position % page].view(kv_cache.dtype)
