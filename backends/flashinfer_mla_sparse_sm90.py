"""FLASHINFER_MLA_SPARSE_SM90: FlashInfer's paged MLA wrapper on Hopper over pages of one token, which lists name.

Each query token is a request whose pages are the slots of its list. Written for 0.7.2, as vLLM 0.33.0 drives it; the
lists are counted on the host, since that is where the wrapper plans.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned, starts_of
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.flashinfer import WORKSPACE_BYTES
from mla_conformance.backends.flashinfer_mla import FlashInferMLADecodeBackend
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import HOPPER, DeviceCapability, Devices
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.backends.sparse_checks import listed


class FlashInferMLASparseSM90Backend(LibraryKernel, SelectedKeysBackend):
    """Lists of any length, over a cache or over gathered keys."""

    name: ClassVar[str] = "FLASHINFER_MLA_SPARSE_SM90"
    libraries: ClassVar[tuple[Library, ...]] = FlashInferMLADecodeBackend.libraries
    devices: ClassVar[Devices] = HOPPER
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64), (512, 0)]
    supports_topk_length: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = Declaration(
        distributions=FlashInferMLADecodeBackend.declaration.distributions,
        rounding=Rounding(partial_outputs=Precision.MODEL),
        deviations=(
            Deviation("wants a list of pages without gaps", "what the lists name, packed on the device"),
            Deviation("plan() before run(), on the host", "plans at each call, which no graph captures"),
            Deviation("pages of one token follow each other", "a cache with gaps between its blocks is copied"),
            Deviation("wants latent and rope part of queries and cache apart", "two views of each, not copied"),
            Deviation("LSE to base 2, [T, N]", "the natural one is asked for and transposed"),
            Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied"),
            Deviation("the scale of an e4m3 cache is a number on the host", "read at each call"),
            Deviation("outputs of split keys are stored in the model's dtype", "declared partial outputs: model"),
        ),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """Versions before the metadata object are planned otherwise, and none of them was tried with lists."""
        library = cls.libraries[0]
        old = not hasattr(library.load(), "MLAPlanMetadata")
        return [f"needs flashinfer-python 0.7 or newer, not {library.version()} ({library.command})"] if old else []

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLASparseSelectorConfig
    ) -> list[str]:
        """As everywhere; codes under queries in bfloat16 alone."""
        reasons = super().validate_configuration(device_capability, selector_config)
        if selector_config.kv_cache_dtype == "fp8" and selector_config.dtype != torch.bfloat16:
            reasons.append(f"kv_cache_dtype fp8 with queries of {selector_config.dtype} not supported")
        return reasons

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrapper: Any = None

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`SelectedKeysBackend`."""
        (source,) = sources
        latent, scales = self.kv_lora_rank, {}
        if source.layout == "fp8":
            scales = dict.fromkeys(("ckv_scale", "kpe_scale"), float(k_scale))
        query, rows = aligned(q), aligned(source.cache.flatten(0, 1).unsqueeze(1))
        output, lse = self._planned(source, q.dtype).run(
            query=(query[..., :latent], query[..., latent:]),
            kv_cache=(rows[..., :latent], rows[..., latent:]),
            return_lse=True,
            return_lse_base_on_e=True,
            **scales,
        )
        return output, lse.mT

    def _planned(self, source: Selected, dtype: torch.dtype) -> Any:
        """The wrapper, planned for these lists."""
        library, named = self.library, listed(source.indices, source.length)
        lengths = named.sum(dim=1, dtype=torch.int32).cpu()
        if self._wrapper is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=named.device)
            self._wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        self._wrapper.plan(
            metadata=library.MLAPlanMetadata.csr(
                qo_indptr=torch.arange(len(lengths) + 1, dtype=torch.int32),
                kv_indptr=starts_of(lengths),
                kv_indices=source.indices[named],
                kv_len_arr=lengths,
            ),
            num_heads=self.num_heads,
            head_dim_ckv=self.kv_lora_rank,
            head_dim_kpe=self.qk_rope_head_dim,
            page_size=1,
            causal=False,
            sm_scale=self.scale,
            q_data_type=dtype,
            kv_data_type=source.cache.dtype,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="basee",
            scale_mode="kv-per-tensor" if source.layout == "fp8" else "default",
        )
        return self._wrapper
