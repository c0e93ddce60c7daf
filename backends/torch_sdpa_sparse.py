"""TORCH_SDPA, sparse: PyTorch's own kernels that return the LSE, over the entries that each row's lists name."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged, torch_rows
from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS

_ADAPTED = packaged.declared(
    "torch",
    ("no lists", "gathers the named entries of every query token; a column that names none is masked"),
    ("no cache of codes", "dequantises with the scales in float32 and rounds to the model's dtype"),
    ("no second cache", "its keys stand behind those of the first"),
)


class TorchSDPASparseBackend(torch_rows.TorchRows, SelectedKeysBackend):
    supported_kv_cache_dtypes = list(CACHE_LAYOUTS)
    supported_extra_kv_cache_dtypes = list(CACHE_LAYOUTS)
    supports_topk_length = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(
        _ADAPTED,
        ("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
        torch_rows.APPROXIMATE_EXP,
        rounding=torch_rows.APPROXIMATE,
    )

    @classmethod
    def resolve(cls, device_capability: packaged.DeviceCapability | None) -> type["TorchSDPASparseBackend"]:
        """The CPU kernel where there is no compute capability, the memory-efficient kernel elsewhere."""
        return cls if device_capability is None else TorchEfficientSparseBackend

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            """Those that the lists name; anything where one names none."""
            keys, named = list[Tensor](), list[Tensor]()
            for x in (source.rows(rows) for source in sources):
                named.append(listed(x.indices, x.length))
                found = gather(x.cache, x.indices.masked_fill(~named[-1], 0).long(), x.layout)
                keys.append(dequantise(found, x.layout, k_scale, q.dtype)[..., : q.shape[2]].to(q.dtype))
            return torch.cat(keys, dim=1), torch.cat(named, dim=1)

        return self.attend_in_parts(q, sum(source.indices.shape[1] for source in sources), keys_of)


class TorchEfficientSparseBackend(torch_rows.TorchEfficientRows, TorchSDPASparseBackend):
    supported_topk = [packaged.MultipleOf(torch_rows.MASK_ALIGNMENT)]
    declaration = packaged.further(
        _ADAPTED,
        ("wants rows that start at multiples of 16 bytes", "other queries are copied"),
        *torch_rows.EFFICIENT,
        rounding=packaged.DEQUANTISES,
    )
