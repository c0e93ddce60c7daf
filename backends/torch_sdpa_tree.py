"""TORCH_SDPA_TREE: PyTorch's own CPU kernel, over latents gathered from the pages, by the masks of trees."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged, torch_rows
from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.tree import MLATreeBackend, TreeBatch, check_tree_operands


class TorchSDPATreeBackend(torch_rows.TorchRows, MLATreeBackend):
    """Every query token is a row against the tokens of its request."""

    name = "TORCH_SDPA_TREE"
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_ds_mla"]
    declaration = packaged.declared(
        "torch",
        ("no paged cache", "gathers the tokens of every query token's request"),
        ("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
        ("a mask for each row", "an additive one, 0 and -inf, of the tree's"),
        ("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
        torch_rows.APPROXIMATE_EXP,
        rounding=torch_rows.APPROXIMATE,
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: packaged.DeviceCapability | None) -> bool:
        return device_capability is None

    def run_tree_decode(
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        metadata, layout, columns = self._decode_metadata, self.kv_cache_dtype, self.kv_lora_rank + q_pe.shape[-1]
        check_tree_operands(self, metadata, ql_nope, q_pe, kv_cache)
        batch, starts = TreeBatch.of(metadata, kv_cache.shape[1]), metadata.query_start_loc.tolist()
        longest = int(batch.lengths.max())
        shape = (len(ql_nope), longest + -longest % torch_rows.MASK_ALIGNMENT)
        slots, visible = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for request, (own, first) in enumerate(zip(batch.slots, batch.mask_starts.tolist(), strict=False)):
            rows, length = slice(*starts[request : request + 2]), len(own)
            if metadata.seq_lens_cpu[request]:  # none of a row of padding
                slots[rows, :length] = own
                seen = batch.mask[first : first + (rows.stop - rows.start) * length]
                visible[rows, :length] = seen.view(-1, length)

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            """The tokens of each row's request, and which of them it sees."""
            keys = dequantise(gather(kv_cache, slots[rows], layout), layout, k_scale, ql_nope.dtype)
            return keys[..., :columns].to(ql_nope.dtype), visible[rows]

        return self.attend_in_parts(torch.cat((ql_nope, q_pe), dim=-1), shape[1], keys_of)
