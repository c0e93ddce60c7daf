"""FLASHMLA_SPARSE: DeepSeek's sparse kernels for Hopper, from the build of ``flash_mla`` that still has them.

A decode reads codes, those of V3.2 or of V4, a prefill plain gathered keys. DeepSeek's own package dropped both for
Hopper in its release of 2026-09-30; the fork on the package index keeps them behind ``use_legacy``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.flash_mla import FORK, is_fork
from mla_conformance.backends.packaged import NEW_SCHEDULE, UNIFORM_BATCH, LibraryKernel, declared, further
from mla_conformance.backends.platform import HOPPER, DeviceCapability
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_V32, _V4 = "fp8_ds_mla", "fp8_v4"
_COARSE_SCALES = "keeps the scales of V3.2's entries in bfloat16"
_KEPT = declared(
    "sgl-flash-mla torch",
    ("decode: lengths are of requests, not of query tokens", "each token is a request of one"),
    ("LSE [B, N, queries of a request] of a decode, [T, N] of a prefill", "[N, T]"),
    ("LSE +inf in a row without keys", "-inf where it is +inf"),
    NEW_SCHEDULE,
    ("reads queries in units of 16 bytes", "queries that start elsewhere are copied"),
    ("reads V3.2's entries without lengths and without a second cache", "declared unsupported"),
    ("reads V3.2's entries with a rope part alone", "others declared unsupported"),
    ("kernels for Hopper on request only", "use_legacy"),
    rounding=Rounding(dequantised_keys=Precision.MODEL),
)


class FlashMLASparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of slots in whole tiles, for 64 or 128 heads."""

    name = "FLASHMLA_SPARSE"
    libraries = (FORK,)
    devices = HOPPER
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = [_V32, _V4]
    supported_extra_kv_cache_dtypes = [_V4]
    supported_tile_scales = ["pow2"]
    supported_latent_dims = [(512, 64), (512, 0)]
    supported_heads = [64, 128]
    supported_topk = [MultipleOf(64)]
    supports_topk_length = True
    supports_sink = True
    cudagraph_support = UNIFORM_BATCH
    declaration = further(_KEPT, (_COARSE_SCALES, "declared: powers of two, which that leaves"))

    @classmethod
    def lacks(cls) -> list[str]:
        """The module may be there without these kernels."""
        if not is_fork(FORK.load()):
            return [f"package flash-mla is installed, but this adapter drives {FORK.distribution} ({FORK.command})"]
        lacking = f"package {FORK.distribution} {FORK.version()} was built without its legacy kernels ({FORK.command})"
        return [] if FORK.load().has_legacy() else [lacking]

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        if config.call == "prefill":
            if config.topk % 128:
                yield f"topk {config.topk} of a prefill not supported (supported: multiples of 128)"
        elif layout_of(config.kv_cache_dtype) == _V32:
            if not config.qk_rope_head_dim:
                yield f"{_V32} of keys without a rope part not supported"
            if config.topk_length:
                yield f"topk_length of lists over {_V32} not supported"
            if config.extra_kv_cache_dtype is not None:
                yield f"a second cache beside {_V32} not supported"

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        flash_mla, (main, *others), latent = FORK.load(), sources, self.kv_lora_rank
        query, indices = aligned(q), main.indices.unsqueeze(1)
        options: dict[str, Any] = {"attn_sink": sink, "topk_length": main.length, "use_legacy": True}
        if main.paged:
            schedule, _ = flash_mla.get_mla_metadata()
            for other in others:
                options |= {"extra_k_cache": other.cache.unsqueeze(2), "extra_topk_length": other.length}
                options["extra_indices_in_kvcache"] = other.indices.unsqueeze(1)
            options |= {"softmax_scale": self.scale, "indices": indices}
            pages = main.cache.unsqueeze(2)
            output, lse = flash_mla.flash_mla_with_kvcache(
                query.unsqueeze(1), pages, None, None, latent, schedule, **options
            )
            output, lse = output.squeeze(1), lse.squeeze(2)
        else:
            output, _, lse = flash_mla.flash_mla_sparse_fwd(query, main.cache, indices, self.scale, latent, **options)
        return output, lse.masked_fill(lse == torch.inf, -torch.inf).mT


class FlashMLASparseFloat32Scales(FlashMLASparseBackend, variant="float32"):
    """The same decode over entries of V3.2 with any float32 scales, as SGLang writes them: no power of two hides what
    the kernel rounds them to."""

    supported_calls = ["decode"]
    supported_kv_cache_dtypes = [_V32]
    supported_extra_kv_cache_dtypes = []
    supported_tile_scales = ["float32"]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = False
    declaration = further(_KEPT, (_COARSE_SCALES, "float32 ones, as they are"))
