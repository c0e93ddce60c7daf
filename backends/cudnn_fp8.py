"""CUDNN[fp8]: cuDNN's attention node for e4m3 operands, which quantises its output itself.

On Hopper it writes e4m3 codes and nothing else, so new tokens with an output scale are all that it computes here.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.cudnn import ALIGNED, OFFSETS, CudnnPrefillBackend
from mla_conformance.backends.cudnn_graph import CUDNN, SCALES, Key, execute
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.platform import HOPPER, Devices
from mla_conformance.backends.quant_key import QuantKey, fp8_static_tensor_sym
from mla_conformance.reference.dimensions import MLADimensions

_P_SCALE = 2.0**8
_SHORTEST = 2
"""What the longest request of a plan has at least; no plan is for one token."""


class CudnnFp8(CudnnPrefillBackend):
    """The node ``sdpa_fp8`` in a graph like that of the variant ``graph``."""

    variant: ClassVar[str] = "fp8"
    devices: ClassVar[Devices] = HOPPER  # where it was tried
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float8_e4m3fn]
    libraries: ClassVar[tuple[Library, ...]] = (CUDNN,)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("nvidia-cudnn-frontend", "nvidia-cudnn-cu13"),
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22),
        deviations=(
            OFFSETS,
            ALIGNED,
            Deviation("output in e4m3 only", "unquantised output and chunks of context are declared unsupported"),
            Deviation("multiplies the output by its scale", "is given the reciprocal, made on the device"),
            Deviation("P is scaled by a number that the caller chooses", "2^8, and its inverse behind the product"),
            Deviation("faults on a request without tokens", "such a request is left out"),
            Deviation("has no plan for requests of one token", "the plan is for two, the lengths say one"),
            Deviation("sums of e4m3 products keep 13 bits behind the point", "declared fp22"),
            Deviation("the largest magnitudes of P and of the output are results too", "dropped"),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Multiples of 16 columns, at most 256."""
        widths = (dimensions.qk_head_dim, dimensions.v_head_dim)
        return max(widths) <= 256 and not any(width % 16 for width in widths)

    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        """Never."""
        return False

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """One static scale for the tensor."""
        return quant_key == fp8_static_tensor_sym()

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :class:`MLAPrefillBackend`."""
        if out is None or output_scale is None or out.dtype != torch.float8_e4m3fn:
            raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only; pass out in e4m3 and output_scale")
        self._scale_o = output_scale.float().reciprocal().reshape(1)
        batch = RaggedBatch.new_tokens(self._prefill_metadata).without_empty_requests()
        output, lse = self._run(q, k, v, batch, out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Refused: its result is never quantised."""
        raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only, that of a context chunk is bfloat16")

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        lse = q.new_empty(q.shape[0], self.num_heads, dtype=torch.float32)
        scales = dict.fromkeys(SCALES, lse.new_ones(1))
        scales |= {"scale_s": lse.new_full((1,), _P_SCALE), "descale_s": lse.new_full((1,), 1 / _P_SCALE)}
        tensors = {"q": q, "k": k, "v": v, "o": output, "stats": lse, **scales, "scale_o": self._scale_o}
        key = Key.of(q, k, v, batch, self.scale)
        key = key._replace(max_query_len=max(_SHORTEST, key.max_query_len), max_key_len=max(_SHORTEST, key.max_key_len))
        self._served = {"plan": execute(key, tensors, batch)}
        return lse.mT
