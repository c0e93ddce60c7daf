"""TORCH_SDPA, sparse: PyTorch's own kernels that return the LSE, over the entries that each row's lists name."""

import torch
from torch import Tensor

from mla_conformance.backends import torch_rows
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.backends.packaged import UNIFORM_BATCH, declared, further
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS

_ADAPTED = declared(
    "torch",
    ("no lists", "gathers the named entries of every query token; a column that names none is masked"),
    ("no cache of codes", "dequantises with the scales in float32 and rounds to the model's dtype"),
    ("no second cache", "its keys stand behind those of the first"),
)


class TorchSDPASparseBackend(torch_rows.TorchRows, SelectedKeysBackend):
    """On a CPU; on a GPU another kernel serves the calls."""

    supported_kv_cache_dtypes = list(CACHE_LAYOUTS)
    supported_extra_kv_cache_dtypes = list(CACHE_LAYOUTS)
    supports_topk_length = True
    cudagraph_support = UNIFORM_BATCH
    declaration = further(
        _ADAPTED,
        ("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
        torch_rows.APPROXIMATE_EXP,
        rounding=torch_rows.APPROXIMATE,
    )

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type["TorchSDPASparseBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientSparseBackend

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            parts = [source.rows(rows) for source in sources]
            keys = torch.cat([self._keys(part, k_scale, q.dtype) for part in parts], dim=1)
            return keys, torch.cat([listed(part.indices, part.length) for part in parts], dim=1)

        return self.attend_in_parts(q, sum(source.indices.shape[1] for source in sources), keys_of)

    def _keys(self, source: Selected, k_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, K, D] in the model's dtype; anything where a list names none."""
        slots = source.indices.masked_fill(~listed(source.indices, source.length), 0).long()
        keys = dequantise(gather(source.cache, slots, source.layout), source.layout, k_scale, dtype)
        return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim].to(dtype)


class TorchEfficientSparseBackend(torch_rows.TorchEfficientRows, TorchSDPASparseBackend):
    """On a GPU."""

    supported_topk = [MultipleOf(torch_rows.MASK_ALIGNMENT)]
    declaration = further(
        _ADAPTED,
        ("wants rows that start at multiples of 16 bytes", "other queries are copied"),
        *torch_rows.EFFICIENT,
        rounding=Rounding(dequantised_keys=Precision.MODEL),
    )
