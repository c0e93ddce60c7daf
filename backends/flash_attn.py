"""FLASH_ATTN: the FlashAttention family, one class a variant.

``fa2`` is the package flash-attn, ``torch`` the FA2 kernels inside PyTorch, ``fa3`` the package fa3-fwd (or upstream's
flash_attn_interface), ``fa4`` the package flash-attn-4. All of them mask bottom-right, take int32 offsets, and return a
natural float32 LSE [N, T].
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, blank_lse, pad_head_dim
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.packaged import COPIES, FP22_SUMS, LSE_INFINITE, NO_OUT, declared
from mla_conformance.backends.platform import FROM_AMPERE, HOPPER
from mla_conformance.backends.ragged import RaggedPrefillBackend

_OF_FA2 = (
    ("needs one head dim of q, k and v", "pads the narrower ones with zeros, slices the output"),
    LSE_INFINITE,
    COPIES,
    NO_OUT,
)
_COMMAND = "pip install --no-build-isolation flash-attn"


class FlashAttnPrefillBackend(RaggedPrefillBackend):
    """The family: on Hopper FA3, on Blackwell FA4, elsewhere FA2, and PyTorch's own where nothing is installed."""

    name = "FLASH_ATTN"
    devices = FROM_AMPERE
    by_device = {9: ("fa3", "fa4", "fa2", "torch"), 10: ("fa4", "fa2", "torch"), 0: ("fa2", "torch", "fa4")}
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256)  # padded
    asked: ClassVar[str] = ""  # how a package is asked for the LSE

    @classmethod
    def takes(cls, qk_head_dim: int, v_head_dim: int) -> bool:
        """Whether the kernel takes these head dims, whose rows fill multiples of 16 bytes, as they are."""
        return qk_head_dim == v_head_dim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit = ALIGNMENT // q.element_size()
        if q.shape[-1] % unit or v.shape[-1] % unit or not self.takes(q.shape[-1], v.shape[-1]):
            width = -(-max(q.shape[-1], v.shape[-1]) // unit) * unit
            q, k, v = (pad_head_dim(x, width) for x in (q, k, v))
        output, lse, *_ = self.call(aligned(q), aligned(k), aligned(v), batch)
        return output[..., : self.v_head_dim], blank_lse(lse, batch)

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        """Output [T, N, columns of v] and LSE [N, T], by the function that all packages share."""
        if not self.variant:
            raise self.not_a_family()
        options = {"softmax_scale": self.scale, "causal": batch.causal, self.asked: True}
        return self.library.flash_attn_varlen_func(q, k, v, **batch.cumulative, **options)


class FlashAttn2(FlashAttnPrefillBackend, variant="fa2"):
    """The package flash-attn, version 2."""

    libraries = (Library("flash_attn.flash_attn_interface", "flash-attn", _COMMAND),)
    asked = "return_attn_probs"
    declaration = declared("flash-attn torch", *_OF_FA2)


class TorchFlashAttention(FlashAttnPrefillBackend, variant="torch"):
    """The FA2 kernels that PyTorch is built with; nothing to install."""

    declaration = declared("torch", *_OF_FA2)

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """A torch built without CUDA has no such kernel."""
        built = torch.backends.cuda.is_built() and torch.backends.cuda.is_flash_attention_available()
        return [] if built else [f"torch {torch.__version__} is built without CUDA flash attention"]

    def kernel_evidence(self) -> dict[str, str]:
        return {"torch": torch.__version__, "operator": "aten::_flash_attention_forward", **super().kernel_evidence()}

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        lengths = (batch.query_start_loc, batch.key_start_loc, batch.max_query_len, batch.max_key_len)
        options = (0.0, batch.causal, False)
        return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, *options, scale=self.scale)


class FlashAttn3(FlashAttnPrefillBackend, variant="fa3"):
    """The package fa3-fwd, forward only and without float16; upstream's own build is used if that is installed."""

    libraries = (Library("fa3_fwd_interface", "fa3-fwd", extra("fa3")),)
    upstream: ClassVar[Library] = Library("flash_attn_interface", "flash-attn-3", extra("fa3"))
    devices = HOPPER._replace(needed="9.x")
    asked = "return_attn_probs"
    supported_dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    declaration = declared(
        "fa3-fwd torch",
        (
            "q, k and v of unequal head dims only at 129-192 with 97-128 columns of v",
            "other head dims are padded with zeros, the output is sliced",
        ),
        ("LSE +inf where a whole call has no key; -inf in a single row", "such a call is not launched"),
        ("the wheel fa3-fwd is built without float16", "declared unsupported"),
        FP22_SUMS,
        COPIES,
        NO_OUT,
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22),
    )

    @classmethod
    def package(cls) -> Library:
        """The build that is installed, fa3-fwd first."""
        return cls.upstream if cls.libraries[0].missing() and not cls.upstream.missing() else cls.libraries[0]

    @property
    def library(self) -> Any:
        return self.package().load()

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """Either build will do."""
        return cls.package().missing()

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        return cls.package().broken()

    def kernel_evidence(self) -> dict[str, str]:
        library = self.package()
        return {library.distribution: library.version(), "module": library.module, "variant": self.variant}

    @classmethod
    def takes(cls, qk_head_dim: int, v_head_dim: int) -> bool:
        """Unequal ones too where it has kernels for them."""
        return (128 < qk_head_dim <= 192 and 96 < v_head_dim <= 128) or super().takes(qk_head_dim, v_head_dim)


class FlashAttn4(FlashAttnPrefillBackend, variant="fa4"):
    """The package flash-attn-4, compiled at the first call for each configuration."""

    libraries = (
        Library("flash_attn.cute", "flash-attn-4", extra("fa4")),
        Library("cutlass", "nvidia-cutlass-dsl", extra("fa4")),
        Library("quack", "quack-kernels", extra("fa4")),
    )
    asked = "return_lse"
    declaration = declared(
        "flash-attn-4 nvidia-cutlass-dsl quack-kernels torch",
        ("its fourth positional argument is not the lengths", "lengths are passed by keyword"),
        ("on Blackwell only head dims up to 128, (192, 128) and (256, 256)", "others are padded"),
        NO_OUT,
    )

    @classmethod
    def takes(cls, qk_head_dim: int, v_head_dim: int) -> bool:
        """Those of DeepSeek's models too."""
        return (qk_head_dim, v_head_dim) == (192, 128) or super().takes(qk_head_dim, v_head_dim)
