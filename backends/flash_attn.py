"""FLASH_ATTN: the FlashAttention family, one class a variant.

``fa2`` is the package flash-attn, ``torch`` the FA2 kernels inside PyTorch, ``fa3`` the package fa3-fwd (or upstream's
flash_attn_interface), ``fa4`` the package flash-attn-4. All of them mask bottom-right, take int32 offsets, and return a
natural float32 LSE [N, T].
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, blank_lse, pad_head_dim
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.platform import FROM_AMPERE, HOPPER, DeviceCapability, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.reference.dimensions import MLADimensions

_WIDEST = 256
_NO_OUT = Deviation("no out argument", "copies the result into out")
_PADS_V = Deviation("needs one head dim of q, k and v", "pads the narrower ones with zeros, slices the output")
_ALIGNED = Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied")
_INFINITE = Deviation("LSE +inf in a row without keys", "-inf in the rows that the lengths say see no key")
_BY_DEVICE = {9: ("fa3", "fa4", "fa2", "torch"), 10: ("fa4", "fa2", "torch")}


class FlashAttnPrefillBackend(RaggedPrefillBackend):
    """The family: on Hopper FA3, on Blackwell FA4, elsewhere FA2, and PyTorch's own where nothing is installed."""

    name: ClassVar[str] = "FLASH_ATTN"
    devices: ClassVar[Devices] = FROM_AMPERE

    @classmethod
    def preference(cls, device_capability: DeviceCapability | None) -> tuple[str, ...]:
        """FA3 is written for Hopper, FA4 for Blackwell."""
        return _BY_DEVICE.get(device_capability.major if device_capability else 0, ("fa2", "torch", "fa4"))

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Anything up to 256 columns, padded."""
        return max(dimensions.qk_head_dim, dimensions.v_head_dim) <= _WIDEST

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        unit = ALIGNMENT // q.element_size()
        if q.shape[-1] % unit or v.shape[-1] % unit or not self._takes(q.shape[-1], v.shape[-1]):
            width = -(-max(q.shape[-1], v.shape[-1]) // unit) * unit
            q, k, v = (pad_head_dim(x, width) for x in (q, k, v))
        output, lse = self._kernel(aligned(q), aligned(k), aligned(v), batch)
        return output[..., : self.v_head_dim], blank_lse(lse, batch)

    def _takes(self, qk_head_dim: int, v_head_dim: int) -> bool:
        """Whether the kernel takes these head dims, whose rows fill multiples of 16 bytes, as they are."""
        return qk_head_dim == v_head_dim

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Output [T, N, columns of v] and LSE [N, T]."""
        raise NotImplementedError(f"FLASH_ATTN is a family of kernels: choose one of {', '.join(self.variants)}")

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, **asked: bool) -> tuple[Tensor, Tensor]:
        """The call that all packages share; ``asked`` is how one is asked for the LSE."""
        output, lse, *_ = self.library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_k=batch.key_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_key_len,
            softmax_scale=self.scale,
            causal=batch.causal,
            **asked,
        )
        return output, lse


class FlashAttn2(FlashAttnPrefillBackend, variant="fa2"):
    """The package flash-attn, version 2."""

    libraries: ClassVar[tuple[Library, ...]] = (
        Library("flash_attn.flash_attn_interface", "flash-attn", "pip install --no-build-isolation flash-attn"),
    )
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flash-attn", "torch"), deviations=(_PADS_V, _INFINITE, _ALIGNED, _NO_OUT)
    )

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        return self._varlen(q, k, v, batch, return_attn_probs=True)


class TorchFlashAttention(FlashAttnPrefillBackend, variant="torch"):
    """The FA2 kernels that PyTorch is built with; nothing to install."""

    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",), deviations=(_PADS_V, _INFINITE, _ALIGNED, _NO_OUT)
    )

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """A torch built without CUDA has no such kernel."""
        built = torch.backends.cuda.is_built() and torch.backends.cuda.is_flash_attention_available()
        return [] if built else [f"torch {torch.__version__} is built without CUDA flash attention"]

    def kernel_evidence(self) -> dict[str, str]:
        """PyTorch's version and operator."""
        return {"torch": torch.__version__, "operator": "aten::_flash_attention_forward", **super().kernel_evidence()}

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        lengths = (batch.query_start_loc, batch.key_start_loc, batch.max_query_len, batch.max_key_len)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, batch.causal, False, scale=self.scale
        )
        return output, lse


class FlashAttn3(FlashAttnPrefillBackend, variant="fa3"):
    """The package fa3-fwd, forward only and without float16; upstream's own build is used if that is installed."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float8_e4m3fn]
    devices: ClassVar[Devices] = HOPPER._replace(needed="9.x")
    libraries: ClassVar[tuple[Library, ...]] = (Library("fa3_fwd_interface", "fa3-fwd", extra("fa3")),)
    upstream: ClassVar[Library] = Library("flash_attn_interface", "flash-attn-3", extra("fa3"))
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("fa3-fwd", "torch"),
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22),
        deviations=(
            Deviation(
                "q, k and v of unequal head dims only at 129-192 with 97-128 columns of v",
                "other head dims are padded with zeros, the output is sliced",
            ),
            Deviation("LSE +inf where a whole call has no key; -inf in a single row", "such a call is not launched"),
            Deviation("the wheel fa3-fwd is built without float16", "declared unsupported"),
            Deviation("sums of e4m3 products keep 13 bits behind the point, for any number of keys", "declared fp22"),
            _ALIGNED,
            _NO_OUT,
        ),
    )

    @classmethod
    def package(cls) -> Library:
        """The build that is installed, fa3-fwd first."""
        return cls.upstream if cls.libraries[0].missing() and not cls.upstream.missing() else cls.libraries[0]

    @property
    def library(self) -> Any:
        """That build."""
        return self.package().load()

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """Either build will do."""
        return cls.package().missing()

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        """Why the installed build does not import."""
        return cls.package().broken()

    def kernel_evidence(self) -> dict[str, str]:
        """Which build served."""
        library = self.package()
        return {library.distribution: library.version(), "module": library.module, "variant": self.variant}

    def _takes(self, qk_head_dim: int, v_head_dim: int) -> bool:
        return (128 < qk_head_dim <= 192 and 96 < v_head_dim <= 128) or super()._takes(qk_head_dim, v_head_dim)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        return self._varlen(q, k, v, batch, return_attn_probs=True)


class FlashAttn4(FlashAttnPrefillBackend, variant="fa4"):
    """The package flash-attn-4, compiled at the first call for each configuration."""

    libraries: ClassVar[tuple[Library, ...]] = (
        Library("flash_attn.cute", "flash-attn-4", extra("fa4")),
        Library("cutlass", "nvidia-cutlass-dsl", extra("fa4")),
        Library("quack", "quack-kernels", extra("fa4")),
    )
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "torch"),
        deviations=(
            Deviation("its fourth positional argument is not the lengths", "lengths are passed by keyword"),
            Deviation("on Blackwell only head dims up to 128, (192, 128) and (256, 256)", "others are padded"),
            _NO_OUT,
        ),
    )

    def _takes(self, qk_head_dim: int, v_head_dim: int) -> bool:
        return (qk_head_dim, v_head_dim) == (192, 128) or super()._takes(qk_head_dim, v_head_dim)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        return self._varlen(q, k, v, batch, return_lse=True)
