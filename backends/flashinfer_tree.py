"""FLASHINFER_TREE: FlashInfer's ragged prefill wrapper with a custom mask, over gathered latents that heads share.

Its kernels take keys of at most 256 columns: other latents than those of deployed models are judged.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import natural_heads_first, pad_head_dim, starts_of
from mla_conformance.backends.flashinfer import DISTRIBUTIONS, FLASHINFER, TVM_FFI, WORKSPACE_BYTES
from mla_conformance.backends.paged import PagedTreeBackend
from mla_conformance.backends.tree import TreeBatch

_WIDTHS = (64, 128, 256)


class FlashInferTreeBackend(PagedTreeBackend):
    name = "FLASHINFER_TREE"
    libraries = (FLASHINFER, TVM_FFI)
    devices = packaged.FROM_AMPERE
    supported_latent_dims = []
    declaration = packaged.declared(
        DISTRIBUTIONS,
        packaged.JOINS_Q,
        ("one head dim of keys and values, 64, 128 or 256", "gathers latents, padded with zeros; the output is cut"),
        ("a mask has columns of the context", "they are added, and all seen"),
        ("0.6.13: LSE to base 2, [T, N]", "times ln 2, transposed; 0.7.2 is asked for a natural LSE [N, T]"),
        ("plan() before run(), with the mask", "plans at every call"),
        packaged.LSE_OF_ROUNDED_P,
        packaged.PARTIAL_OUTPUTS,
        rounding=packaged.ROUNDED_P_IN_PARTS,
    )

    @classmethod
    def _reasons(cls, config: Any) -> Iterator[str]:
        yield from super()._reasons(config)
        if (columns := config.kv_lora_rank + config.qk_rope_head_dim) > _WIDTHS[-1]:
            yield f"keys of {columns} columns not supported (at most {_WIDTHS[-1]})"

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, batch = self._decode_metadata, TreeBatch.of(self._decode_metadata, kv_cache.shape[1])
        columns = ql_nope.shape[-1] + q_pe.shape[-1]
        width = next(width for width in _WIDTHS if width >= columns)
        q = pad_head_dim(torch.cat([ql_nope, q_pe], dim=-1), width)
        keys = pad_head_dim(kv_cache.flatten(0, 1)[torch.cat(batch.slots)].unsqueeze(1), width)
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = FLASHINFER.load().BatchPrefillWithRaggedKVCacheWrapper(self._buffer, "NHD", backend="fa2")
        starts = (metadata.query_start_loc, starts_of(batch.lengths).to(q.device))
        dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": q.dtype}
        sizes = {"head_dim_vo": width, "custom_mask": batch.mask, "sm_scale": self.scale}
        wrapper.plan(*starts, self.num_heads, 1, width, **sizes, **dtypes)
        natural = packaged.has_parameter(wrapper.run, "lse_base")
        options: dict[str, Any] = {"lse_base": "ln", "lse_layout": "HN"} if natural else {}
        output, lse = wrapper.run(q, keys, keys, return_lse=True, **options)
        return output[..., : self.kv_lora_rank].contiguous(), lse if natural else natural_heads_first(lse)
