"""Wrong only where q, k and v are e4m3."""

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.defects.tensor_core import HopperE4M3Operands


@known_defect(
    "hopper-fp8-accumulator-keeps-13-bits",
    killed_by="fp8_operands",
    sources=(
        "vllm-project/vllm#23813",
        "Dao-AILab/flash-attention#2250",
    ),
)
class AccumulatesIn22Bits(HopperE4M3Operands):
    """Sums of e4m3 products keep 13 bits behind the point where float32 is declared."""

    declaration = Declaration(e4m3_rounding=Rounding(p=Precision.SCALED_E4M3), emulated=True)


@known_defect(
    "e4m3fn-codes-read-as-e4m3fnuz",
    killed_by="fp8_operands",
    related=("quant_output_fp8",),
    sources=(
        "vllm-project/vllm#42893",
        "vllm-project/vllm#45562",
    ),
)
class ReadsFnuzCodes(EagerPrefillBackend):
    """Codes of e4m3fn are read as e4m3fnuz: half of each value, and -0 is NaN."""

    def _widened(self, x):
        return super()._widened(x.view(torch.float8_e4m3fnuz) if x.dtype == torch.float8_e4m3fn else x)
