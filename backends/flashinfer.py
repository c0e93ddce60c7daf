"""FLASHINFER: the ragged prefill wrapper, with the backend of FlashInfer that the variant names.

Written for 0.6.13, whose LSE is base 2 and [T, N] and whose infinity is 5e4, and for 0.7.2, which converts on request.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, natural_heads_first, pad_head_dim
from mla_conformance.backends.declaration import Declaration, Deviation, LseClass, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.platform import BLACKWELL, FROM_AMPERE, HOPPER, DeviceCapability, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend

FLASHINFER = Library("flashinfer", "flashinfer-python", extra("flashinfer"))
TVM_FFI = Library("tvm_ffi", "apache-tvm-ffi", extra("flashinfer"))
DISTRIBUTIONS = ("flashinfer-python", "apache-tvm-ffi")
WORKSPACE_BYTES = 128 << 20
_E4M3_HEAD_DIMS = (64, 128, 256)
_DEVIATIONS = (
    Deviation("0.6.13: LSE to base 2, [T, N]", "times ln 2, transposed; 0.7.2 is asked for a natural LSE [N, T]"),
    Deviation("0.6.13: LSE about -50000 in a row without keys", "-inf in the rows that the lengths say see no key"),
    Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied"),
    Deviation("plan() before run(), float16 and d^-1/2 by default", "plans once a batch and chunk, naming all of it"),
)


class FlashInferPrefillBackend(RaggedPrefillBackend):
    """The family: fa3 on Hopper, cutlass on Blackwell, fa2 elsewhere."""

    name: ClassVar[str] = "FLASHINFER"
    libraries: ClassVar[tuple[Library, ...]] = (FLASHINFER, TVM_FFI)
    devices: ClassVar[Devices] = FROM_AMPERE
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ((192, 128), (128, 128), (256, 256))
    declaration: ClassVar[Declaration] = Declaration(distributions=DISTRIBUTIONS, deviations=_DEVIATIONS)

    @classmethod
    def preference(cls, device_capability: DeviceCapability | None) -> tuple[str, ...]:
        """The kernels written for the device first."""
        by_device = {9: ("fa3", "fa2"), 10: ("cutlass", "fa2")}
        return by_device.get(device_capability.major if device_capability else 0, ("fa2",))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        q, k, v = self._fitted(q, k, v)
        if batch.chunk_idx not in self._plans:
            self._plans[batch.chunk_idx] = self._plan(q, v.shape[-1], batch)
        wrapper = self._plans[batch.chunk_idx]
        fits = out is not None and out.shape[-1] == v.shape[-1] and out.is_contiguous() and aligned(out) is out
        natural = "lse_base" in inspect.signature(wrapper.run).parameters
        options: dict[str, Any] = {"lse_base": "ln", "lse_layout": "HN"} if natural else {}
        options |= {"out": out if fits else None, "return_lse": True}
        output, lse = wrapper.run(aligned(q), aligned(k), aligned(v), *self._scales(q), **options)
        return output[..., : self.v_head_dim], blank_lse(lse if natural else natural_heads_first(lse), batch)

    def _fitted(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """q, k and v with head dims that a kernel is compiled for."""
        return operands

    def _scales(self, q: Tensor) -> tuple[Tensor, ...]:
        """Further arguments of a call."""
        return ()

    def _plan(self, q: Tensor, v_columns: int, batch: RaggedBatch) -> Any:
        """A wrapper of its own for each live plan; they share one workspace and run in stream order."""
        wrapper = FLASHINFER.load().BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace(q.device), "NHD", backend=self.variant
        )
        wrapper.plan(
            batch.query_start_loc,
            batch.key_start_loc,
            self.num_heads,
            self.num_heads,
            q.shape[-1],
            head_dim_vo=v_columns,
            causal=batch.causal,
            sm_scale=self.scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
            o_data_type=output_dtype(q.dtype),
        )
        self._served = {"backend": str(getattr(wrapper, "_backend", self.variant))}
        return wrapper

    def _workspace(self, device: torch.device) -> Tensor:
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._buffer


class FlashInferFa2(FlashInferPrefillBackend, variant="fa2"):
    """FlashInfer's FA2 kernels; long keys are split and the partial outputs stored in the model's dtype."""

    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        rounding=Rounding(lse=LseClass.ROUNDED_P, partial_outputs=Precision.MODEL),
        deviations=(
            *_DEVIATIONS,
            Deviation("the row sum adds P as rounded: the LSE is off by up to 2^-9", "declared rounded-p"),
            Deviation("outputs of split keys are stored in the model's dtype", "declared partial outputs: model"),
        ),
    )


class FlashInferFa3(FlashInferPrefillBackend, variant="fa3"):
    """FlashInfer's Hopper kernels, those for operands in e4m3 among them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    devices: ClassVar[Devices] = HOPPER
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22),
        deviations=(
            *_DEVIATIONS,
            Deviation("e4m3 kernels have one head dim, 64, 128 or 256", "padded with zeros, the output is sliced"),
            Deviation("e4m3 operands need scales of each head", "scales of 1 are handed over"),
            Deviation("sums of e4m3 products keep 13 bits behind the point, for any number of keys", "declared fp22"),
        ),
    )

    def _fitted(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if operands[0].dtype != torch.float8_e4m3fn:
            return operands
        widest = max(x.shape[-1] for x in operands)
        width = min(width for width in _E4M3_HEAD_DIMS if width >= widest)
        return tuple(pad_head_dim(x, width) for x in operands)

    def _scales(self, q: Tensor) -> tuple[Tensor, ...]:
        """Those of q, k and v [N]."""
        if q.dtype != torch.float8_e4m3fn:
            return ()
        return (torch.ones(self.num_heads, dtype=torch.float32, device=q.device),) * 3


class FlashInferCutlass(FlashInferPrefillBackend, variant="cutlass"):
    """CUTLASS's Blackwell kernels."""

    devices: ClassVar[Devices] = BLACKWELL
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ((192, 128), (128, 128))
