"""FLASH_ATTN: the FlashAttention family. All of it masks bottom-right and returns a natural float32 LSE [N, T]."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, pad_head_dim
from mla_conformance.backends.library_roles import RaggedPrefillBackend

_OF_FA2 = (
    ("needs one head dim of q, k and v", "pads the narrower ones with zeros, slices the output"),
    packaged.LSE_INFINITE,
    packaged.COPIES,
    packaged.NO_OUT,
)
_COMMAND = "pip install --no-build-isolation flash-attn"
_UPSTREAMS_FA3 = packaged.in_extra("fa3", "flash_attn_interface", "flash-attn-3")


class FlashAttnPrefillBackend(RaggedPrefillBackend):
    """The family: on Hopper FA3, on Blackwell FA4, elsewhere FA2, and PyTorch's own where nothing is installed."""

    name = "FLASH_ATTN"
    devices = packaged.FROM_AMPERE
    by_device = {9: ("fa3", "fa4", "fa2", "torch"), 10: ("fa4", "fa2", "torch"), 0: ("fa2", "torch", "fa4")}
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256)  # padded
    blanks = ("lse",)
    asked: ClassVar[str] = ""  # how a package is asked for the LSE
    takes_unequal: ClassVar[Any] = staticmethod(lambda qk, v: False)  # which unequal head dims it takes as they are

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit, qk_width, v_width = ALIGNMENT // q.element_size(), q.shape[-1], v.shape[-1]
        equal = qk_width == v_width or self.takes_unequal(qk_width, v_width)
        if qk_width % unit or v_width % unit or not equal:
            width = -(-max(qk_width, v_width) // unit) * unit
            q, k, v = (pad_head_dim(x, width) for x in (q, k, v))
        output, lse, *_ = self.call(aligned(q), aligned(k), aligned(v), batch)
        return output[..., : self.v_head_dim], lse

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        options = {"softmax_scale": self.scale, "causal": batch.causal, self.asked: True}
        return self.library.flash_attn_varlen_func(q, k, v, **batch.cumulative, **options)


FlashAttnPrefillBackend.also(
    "fa2",
    libraries=(packaged.Library("flash_attn.flash_attn_interface", "flash-attn", _COMMAND),),
    asked="return_attn_probs",
    declaration=packaged.declared("flash-attn torch", *_OF_FA2),
)


class TorchFlashAttention(FlashAttnPrefillBackend, variant="torch"):
    of_torch = {"torch": torch.__version__, "operator": "aten::_flash_attention_forward"}
    declaration = packaged.declared("torch", *_OF_FA2)

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        built = torch.backends.cuda.is_built() and torch.backends.cuda.is_flash_attention_available()
        return [] if built else [f"torch {torch.__version__} is built without CUDA flash attention"]

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        options = (*batch.lengths, 0.0, batch.causal, False)
        return torch.ops.aten._flash_attention_forward(q, k, v, *options, scale=self.scale)


FlashAttnPrefillBackend.also(
    "fa3",
    libraries=(packaged.in_extra("fa3", "fa3_fwd_interface", "fa3-fwd", other=_UPSTREAMS_FA3),),
    devices=packaged.HOPPER._replace(needed="9.x"),
    asked="return_attn_probs",
    takes_unequal=staticmethod(lambda qk, v: 128 < qk <= 192 and 96 < v <= 128),  # that it has kernels for
    supported_dtypes=[torch.bfloat16, torch.float8_e4m3fn],
    declaration=packaged.declared(
        "fa3-fwd torch",
        (
            "q, k and v of unequal head dims only at 129-192 with 97-128 columns of v",
            "other head dims are padded with zeros, the output is sliced",
        ),
        ("LSE +inf where a whole call has no key; -inf in a single row", "such a call is not launched"),
        ("the wheel fa3-fwd is built without float16", "declared unsupported"),
        packaged.FP22_SUMS,
        packaged.COPIES,
        packaged.NO_OUT,
        e4m3_rounding=packaged.SCALED_P_FP22,
    ),
)
_OF_FA4 = {"flash_attn.cute": "flash-attn-4", "cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels"}
FlashAttnPrefillBackend.also(  # which compiles at the first call for each configuration
    "fa4",
    libraries=tuple(packaged.in_extra("fa4", *each) for each in _OF_FA4.items()),
    asked="return_lse",
    takes_unequal=staticmethod(lambda qk, v: (qk, v) == (192, 128)),
    declaration=packaged.declared(
        "flash-attn-4 nvidia-cutlass-dsl quack-kernels torch",
        ("its fourth positional argument is not the lengths", "lengths are passed by keyword"),
        ("on Blackwell only head dims up to 128, (192, 128) and (256, 256)", "others are padded"),
        packaged.NO_OUT,
    ),
)
