"""TOKENSPEED_MLA: the CuTe DSL prefill kernel of tokenspeed-mla for Blackwell, compiled at the first call."""

from typing import ClassVar

import torch

from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.reference.dimensions import MLADimensions

_COMMAND = extra("tokenspeed-mla")
TOKENSPEED_MLA = Library("tokenspeed_mla", "tokenspeed-mla", _COMMAND)
LIBRARIES = (
    TOKENSPEED_MLA,
    Library("cutlass", "nvidia-cutlass-dsl", _COMMAND),
    Library("tokenspeed_triton", "tokenspeed-triton", _COMMAND),
    Library("tvm_ffi", "apache-tvm-ffi", _COMMAND),
)
DISTRIBUTIONS = ("tokenspeed-mla", "nvidia-cutlass-dsl")
_HEAD_DIMS = ((192, 128), (128, 128), (64, 64), (32, 32))


def swallowed_import_error() -> list[str]:
    """Why the package, which imports whatever it lacks, cannot run; empty if it can."""
    swallowed = getattr(TOKENSPEED_MLA.load(), "_IMPORT_ERROR", None)
    return [] if swallowed is None else [f"package tokenspeed-mla is installed, but cannot run: {swallowed}"]


class TokenspeedMLAPrefillBackend(RaggedPrefillBackend):
    """One call a batch; the LSE needs no conversion but its layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float8_e4m3fn]
    needed_capability: ClassVar[str] = "10.x"
    libraries: ClassVar[tuple[Library, ...]] = LIBRARIES
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        e4m3_rounding=Rounding(p=Precision.E4M3),
        deviations=(
            Deviation("strides of q, k and v are ignored", "all three are made contiguous"),
            Deviation("LSE [T, N]", "transposed"),
            Deviation("the output is bfloat16 whatever the inputs are", "float16 is not declared"),
            Deviation("the maximum may lag by 2^8, so P in e4m3 has no scale", "declared e4m3"),
            Deviation("imports even where its dependencies are missing", "its recorded import error is reported"),
        ),
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "TOKENSPEED_MLA"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Blackwell of a data centre: 10.0, 10.3, 10.7."""
        return device_capability is not None and device_capability.major == 10

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """What the library asserts."""
        return (dimensions.qk_head_dim, dimensions.v_head_dim) in _HEAD_DIMS

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        """The package swallows its import error; it is asked for it."""
        return super().broken_dependencies() or swallowed_import_error()

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        output, lse = TOKENSPEED_MLA.load().tokenspeed_mla_prefill(
            query=q.contiguous(),
            key=k.contiguous(),
            value=v.contiguous(),
            seq_lens=batch.key_start_loc.diff(),
            cum_seq_lens=batch.key_start_loc,
            max_seq_len=batch.max_key_len,
            batch_size=len(batch.query_lens),
            softmax_scale=self.scale,
            is_causal=batch.causal,
            return_lse=True,
            cum_seq_lens_q=batch.query_start_loc,
            max_seq_len_q=batch.max_query_len,
            out=out if out is not None and out.is_contiguous() else None,
        )
        return output, lse.mT
