"""TORCH_SDPA, decode: PyTorch's own kernels that return the LSE, over latents gathered from the pages.

Every query token is a row against the tokens of its request. Gather and mask are tensor operations of fixed shapes
without a synchronisation, so a call may be captured in a CUDA graph whose buffers change later.
"""

import torch
from torch import Tensor

from mla_conformance.backends import packaged, torch_rows
from mla_conformance.backends.cache_dtypes import dequantise
from mla_conformance.backends.decode import MLADecodeBackend, check_decode_operands, positions_of

_ADAPTED = packaged.declared(
    "torch",
    ("no paged cache", "gathers the pages of every query token's request; ids past the last page are clamped"),
    ("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
    ("causal mask aligned top-left", "an additive mask from the positions in the sequence"),
)


class TorchSDPADecodeBackend(torch_rows.TorchRows, MLADecodeBackend):
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len = None
    supports_nonuniform_queries = True
    supports_causal_dcp = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(
        _ADAPTED,
        (
            "a row without keys is NaN, and a batch without any ends the process",
            "a call has masked keys at least; such a row is blanked: output 0, LSE -inf",
        ),
        torch_rows.APPROXIMATE_EXP,
        rounding=torch_rows.APPROXIMATE,
    )

    @classmethod
    def resolve(cls, device_capability: packaged.DeviceCapability | None) -> type["TorchSDPADecodeBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientDecodeBackend

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, page, token = self._decode_metadata, kv_cache.shape[1], torch.arange(len(ql_nope), device=q_pe.device)
        check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        # The request of each query token, and the last position in the whole sequence that it sees; -1 for none.
        starts, table = metadata.query_start_loc, metadata.block_table
        request = torch.searchsorted(starts[1:], token.to(starts.dtype), right=True).clamp(max=starts.shape[0] - 2)
        totals = metadata.seq_lens if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
        last = (totals[request] - starts[1:][request] + token).masked_fill(token >= starts[-1], -1)
        tokens = max(1, min(metadata.max_seq_len, table.shape[1] * page))
        position = torch.arange(tokens + -tokens % torch_rows.MASK_ALIGNMENT, device=kv_cache.device)
        positions, columns = positions_of(metadata, position), (position // page).clamp(max=table.shape[1] - 1)
        # Float8 as bytes, since it cannot be indexed everywhere.
        entries = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            """Entries of each row; past its last token, whatever the clamped ids lead to."""
            blocks = table[request[rows]][:, columns].long().clamp(0, kv_cache.shape[0] - 1)
            found = entries[blocks, position % page].view(kv_cache.dtype)
            keys = dequantise(found, self.kv_cache_dtype, k_scale, ql_nope.dtype).to(ql_nope.dtype)
            return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim], positions <= last[rows].unsqueeze(1)

        return self.attend_in_parts(torch.cat((ql_nope, q_pe), dim=-1), len(position), keys_of)


class TorchEfficientDecodeBackend(torch_rows.TorchEfficientRows, TorchSDPADecodeBackend):
    declaration = packaged.further(_ADAPTED, *torch_rows.EFFICIENT, rounding=packaged.DEQUANTISES)
