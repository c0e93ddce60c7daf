"""FLASHMLA_SPARSE: DeepSeek's sparse kernels for Hopper, from the build of ``flash_mla`` that still has them.

A decode reads codes, those of V3.2 or of V4, a prefill plain gathered keys. DeepSeek's own package dropped both for
Hopper in its release of 2026-09-30; the fork on the package index keeps them behind ``use_legacy``.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.flash_mla import FORK, is_fork
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import HOPPER, DeviceCapability, Devices
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.sparse import MLASparseSelectorConfig

_V32, _V4 = "fp8_ds_mla", "fp8_v4"
_PREFILL_COLUMNS = 128
_COARSE_SCALES = "keeps the scales of V3.2's entries in bfloat16"
_DEVIATIONS = (
    Deviation("decode: lengths are of requests, not of query tokens", "each token is a request of one"),
    Deviation("LSE [B, N, queries of a request] of a decode, [T, N] of a prefill", "[N, T]"),
    Deviation("LSE +inf in a row without keys", "-inf where it is +inf"),
    Deviation("a schedule holds for one batch of lengths", "a new one at each call, made on the device"),
    Deviation("reads queries in units of 16 bytes", "queries that start elsewhere are copied"),
    Deviation("reads V3.2's entries without lengths and without a second cache", "declared unsupported"),
    Deviation("reads V3.2's entries with a rope part alone", "others declared unsupported"),
    Deviation("kernels for Hopper on request only", "use_legacy"),
)


class FlashMLASparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of slots in whole tiles, for 64 or 128 heads."""

    name: ClassVar[str] = "FLASHMLA_SPARSE"
    libraries: ClassVar[tuple[Library, ...]] = (FORK,)
    devices: ClassVar[Devices] = HOPPER
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [_V32, _V4]
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = [_V4]
    supported_tile_scales: ClassVar[list[str]] = ["pow2"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64), (512, 0)]
    supported_heads: ClassVar[list[int]] = [64, 128]
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(64)]
    supports_topk_length: ClassVar[bool] = True
    supports_sink: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        rounding=Rounding(dequantised_keys=Precision.MODEL),
        distributions=("sgl-flash-mla", "torch"),
        deviations=(*_DEVIATIONS, Deviation(_COARSE_SCALES, "declared: powers of two, which that leaves")),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """The module may be there without these kernels."""
        library = FORK.load()
        if not is_fork(library):
            return [f"package flash-mla is installed, but this adapter drives {FORK.distribution} ({FORK.command})"]
        lacking = f"package {FORK.distribution} {FORK.version()} was built without its legacy kernels ({FORK.command})"
        return [] if library.has_legacy() else [lacking]

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLASparseSelectorConfig
    ) -> list[str]:
        """As everywhere; each kernel has limits of its own besides."""
        reasons = super().validate_configuration(device_capability, selector_config)
        return [*reasons, *_limits(selector_config)]

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`SelectedKeysBackend`."""
        run = self._decode if sources[0].paged else self._prefill
        output, lse = run(aligned(q), sources, sink)
        return output, lse.masked_fill(lse == torch.inf, -torch.inf).mT

    def _decode(self, q: Tensor, sources: list[Selected], sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output [T, N, L] and LSE [T, N]."""
        library, (main, *others) = FORK.load(), sources
        schedule, _ = library.get_mla_metadata()
        extra: dict[str, Any] = {}
        for other in others:
            extra["extra_k_cache"] = other.cache.unsqueeze(2)
            extra["extra_indices_in_kvcache"] = other.indices.unsqueeze(1)
            extra["extra_topk_length"] = other.length
        output, lse = library.flash_mla_with_kvcache(
            q.unsqueeze(1),
            main.cache.unsqueeze(2),
            None,
            None,
            self.kv_lora_rank,
            schedule,
            softmax_scale=self.scale,
            indices=main.indices.unsqueeze(1),
            topk_length=main.length,
            attn_sink=sink,
            use_legacy=True,
            **extra,
        )
        return output.squeeze(1), lse.squeeze(2)

    def _prefill(self, q: Tensor, sources: list[Selected], sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output [T, N, L] and LSE [T, N]."""
        (gathered,) = sources
        output, _, lse = FORK.load().flash_mla_sparse_fwd(
            q,
            gathered.cache,
            gathered.indices.unsqueeze(1),
            self.scale,
            self.kv_lora_rank,
            attn_sink=sink,
            topk_length=gathered.length,
            use_legacy=True,
        )
        return output, lse


class FlashMLASparseFloat32Scales(FlashMLASparseBackend):
    """The same decode over entries of V3.2 with any float32 scales, as SGLang writes them: no power of two hides what
    the kernel rounds them to."""

    variant: ClassVar[str] = "float32"
    supported_calls: ClassVar[list[str]] = ["decode"]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [_V32]
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = []
    supported_tile_scales: ClassVar[list[str]] = ["float32"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supports_topk_length: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        rounding=FlashMLASparseBackend.declaration.rounding,
        distributions=FlashMLASparseBackend.declaration.distributions,
        deviations=(*_DEVIATIONS, Deviation(_COARSE_SCALES, "float32 ones, as they are")),
    )


def _limits(config: MLASparseSelectorConfig) -> Iterator[str]:
    """What one of the kernels does not take, though another one does."""
    if config.call == "prefill":
        if config.topk % _PREFILL_COLUMNS:
            yield f"topk {config.topk} of a prefill not supported (supported: multiples of {_PREFILL_COLUMNS})"
    elif layout_of(config.kv_cache_dtype) == _V32:
        if not config.qk_rope_head_dim:
            yield f"{_V32} of keys without a rope part not supported"
        if config.topk_length:
            yield f"topk_length of lists over {_V32} not supported"
        if config.extra_kv_cache_dtype is not None:
            yield f"a second cache beside {_V32} not supported"
