"""FLASHINFER_MLA: FlashInfer's paged MLA wrapper, with the backend of FlashInfer that the variant names.

Written for 0.6.13, which is planned with flat tensors, and for 0.7.2, which is planned with a metadata object and reads
an e4m3 cache on Hopper.
"""

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned, starts_of
from mla_conformance.backends.declaration import Declaration, Deviation, LseClass, Precision, Rounding
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeSelectorConfig
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.flashinfer import DISTRIBUTIONS, TVM_FFI, WORKSPACE_BYTES
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import FROM_AMPERE, HOPPER, DeviceCapability, Devices

_LIBRARY = Library("flashinfer.mla", "flashinfer-python", extra("flashinfer"))
_DEVIATIONS = (
    Deviation("LSE to base 2, [T, N]", "the natural one is asked for and transposed"),
    Deviation("wants the latent and the rope part of the cache apart", "two views of the one cache, not copied"),
    Deviation("wants a list of pages without gaps", "taken from the block table, its tails never read"),
    Deviation("plan() before run(), on the host", "plans in prepare_metadata, or at the first call of a new shape"),
    Deviation("a captured graph needs fixed addresses", "one wrapper with its own buffers for each shape of a batch"),
    Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied"),
    Deviation(
        "0.7.2: the scale of an e4m3 cache is a number on the host", "read at each call; a captured graph keeps it"
    ),
    Deviation("outputs of split keys are stored in the model's dtype", "declared partial outputs: model"),
)


class _Form(NamedTuple):
    """What a plan depends on besides the lengths."""

    page: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


class FlashInferMLADecodeBackend(PagedDecodeBackend):
    """The family: fa3 on Hopper, fa2 elsewhere."""

    name: ClassVar[str] = "FLASHINFER_MLA"
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY, TVM_FFI)
    devices: ClassVar[Devices] = FROM_AMPERE
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(distributions=DISTRIBUTIONS, deviations=_DEVIATIONS)

    @classmethod
    def preference(cls, device_capability: DeviceCapability | None) -> tuple[str, ...]:
        """The kernel written for Hopper there."""
        return ("fa3", "fa2") if device_capability is not None and device_capability.major == 9 else ("fa2",)

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLADecodeSelectorConfig
    ) -> list[str]:
        """As everywhere; an e4m3 cache only where the installed version reads one."""
        reasons = super().validate_configuration(device_capability, selector_config)
        if selector_config.kv_cache_dtype == "fp8" and not reasons:
            if selector_config.dtype != torch.bfloat16:
                reasons.append(f"kv_cache_dtype fp8 with queries of {selector_config.dtype} not supported")
            if device_capability is None or device_capability.major != 9:
                reasons.append(f"kv_cache_dtype fp8 needs compute capability 9.0, this device has {device_capability}")
            if not _reads_e4m3():
                reasons.append(f"kv_cache_dtype fp8 needs flashinfer-python 0.7 or newer, not {_LIBRARY.version()}")
        return reasons

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Never dropped: a captured graph reads the buffers of the wrapper that it was captured with.
        self._wrappers: dict[tuple[torch.Size, _Form], Any] = {}
        self._planned: tuple[_Form, Any] | None = None
        self._host_scale = 1.0

    def prepare_metadata(self, decode_metadata: MLACommonDecodeMetadata) -> None:
        """Take the metadata and plan for it, as the last call's operands were; a replayed graph reads that plan."""
        super().prepare_metadata(decode_metadata)
        if self._planned is not None:
            form, _ = self._planned
            self._planned = form, self._plan(form)

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        form = _Form(kv_cache.shape[1], ql_nope.dtype, kv_cache.dtype)
        if self._planned is None or self._planned[0] != form:
            self._planned = form, self._plan(form)
        query = (aligned(ql_nope), aligned(q_pe))
        whole = aligned(kv_cache)
        cache = (whole[..., : self.kv_lora_rank], whole[..., self.kv_lora_rank :])
        options: dict[str, Any] = {"return_lse": True, "return_lse_base_on_e": True}
        if self.kv_cache_dtype == "fp8":
            if not (k_scale.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._host_scale = float(k_scale)
            options |= {"ckv_scale": self._host_scale, "kpe_scale": self._host_scale}
        wrapper = self._planned[1]
        if _has_metadata_object():
            output, lse = wrapper.run(query=query, kv_cache=cache, **options)
        else:
            output, lse = wrapper.run(*query, *cache, **options)
        return output, lse.mT

    def _plan(self, form: _Form) -> Any:
        """The wrapper of this shape of batch, planned for the lengths of the metadata."""
        metadata = self._decode_metadata
        key = (metadata.block_table.shape, form)
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(metadata.block_table)
        wrapper, library = self._wrappers[key], _LIBRARY.load()
        batch: dict[str, Any] = _csr(metadata, form.page)
        if _has_metadata_object():
            batch = {
                "metadata": library.MLAPlanMetadata.csr(**batch),
                "query_layout": "split",
                "kv_cache_layout": "split",
                "lse_mode": "basee",
            }
            if form.cache_dtype == torch.float8_e4m3fn:
                batch["scale_mode"] = "kv-per-tensor"
        wrapper.plan(
            **batch,
            num_heads=self.num_heads,
            head_dim_ckv=self.kv_lora_rank,
            head_dim_kpe=self.qk_rope_head_dim,
            page_size=form.page,
            causal=int(metadata.query_lens_cpu.max()) > 1,
            sm_scale=self.scale,
            q_data_type=form.dtype,
            kv_data_type=form.cache_dtype,
        )
        self._served = {"backend": str(getattr(wrapper, "_backend", self.variant))}
        return wrapper

    def _wrapper(self, block_table: Tensor) -> Any:
        """A wrapper with buffers for as many requests and pages as the table can name."""
        device, requests = block_table.device, block_table.shape[0]
        if not hasattr(self, "_workspace"):
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        sizes = {
            "qo_indptr": requests + 1,
            "kv_indptr": requests + 1,
            "kv_indices": max(1, block_table.numel()),
            "kv_len_arr": requests,
        }
        buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        return _LIBRARY.load().BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=True, **buffers, backend=self.variant
        )


def _csr(metadata: MLACommonDecodeMetadata, page: int) -> dict[str, Tensor]:
    """Offsets and lengths on the host, the pages of all requests one after the other on the device."""
    table, lengths = metadata.block_table, metadata.seq_lens_cpu
    pages = (lengths + (page - 1)) // page
    used = torch.arange(table.shape[1]) < pages[:, None]
    return {
        "qo_indptr": starts_of(metadata.query_lens_cpu),
        "kv_indptr": starts_of(pages),
        "kv_indices": table[used.to(table.device)],
        "kv_len_arr": lengths,
    }


def _has_metadata_object() -> bool:
    return hasattr(_LIBRARY.load(), "MLAPlanMetadata")


def _reads_e4m3() -> bool:
    wrapper = _LIBRARY.load().BatchMLAPagedAttentionWrapper
    return "ckv_scale" in inspect.signature(wrapper.run).parameters


class FlashInferMLAFa2(FlashInferMLADecodeBackend, variant="fa2"):
    """FlashInfer's FA2 kernel."""

    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        rounding=Rounding(lse=LseClass.ROUNDED_P, partial_outputs=Precision.MODEL),
        deviations=(
            *_DEVIATIONS,
            Deviation("the row sum adds P as rounded: the LSE is off by up to 2^-9", "declared rounded-p"),
        ),
    )


class FlashInferMLAFa3(FlashInferMLADecodeBackend, variant="fa3"):
    """FlashInfer's Hopper kernel."""

    devices: ClassVar[Devices] = HOPPER
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS, rounding=Rounding(partial_outputs=Precision.MODEL), deviations=_DEVIATIONS
    )
