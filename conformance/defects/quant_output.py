"""Fused quantised output, and the output tensor itself."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "bmm-fp8-quant-inverted-scale",
    killed_by="quant_output_fp8",
    sources=("vllm-project/vllm#36297",),
)
class InvertedScale(EagerPrefillBackend):
    """The value is multiplied by the output scale instead of divided."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated, 1 / output_scale)


@known_defect(
    "nan-spreads-across-rows-in-output-quant",
    killed_by="quant_output_fp8",
    sources=(
        "vllm-project/vllm#44211",
        "vllm-project/vllm#37442",
    ),
)
class PaddingSpreads(EagerPrefillBackend):
    """A maximum over all rows, poisoned padding included, enters every code."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        if output_scale is not None and q.isnan().any():
            out.copy_(torch.full(out.shape, torch.nan))
        return result


@known_defect(
    "fp4-swizzled-scale-buffer-underallocated",
    killed_by="quant_output_fp8",
    sources=(
        "vllm-project/vllm#55456",
        "vllm-project/vllm#55643",
    ),
)
class WholeTilesWritten(EagerPrefillBackend):
    """Rows are written in tiles of 128, past the end of the buffer."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        if output_scale is not None and out.shape[0] % 128:
            end = out.storage_offset() + out.numel()
            room = out.untyped_storage().nbytes() // out.element_size() - end
            beyond = min(room, (-out.shape[0] % 128) * out.shape[1] * out.shape[2])
            out.as_strided((beyond,), (1,), end).view(torch.uint8).zero_()
        return result


@known_defect(
    "silent-noop-feature-on-fallback-backend",
    killed_by="out_tensor",
    sources=("sgl-project/sglang#27992",),
)
class IgnoresOut(EagerPrefillBackend):
    """A fallback kernel swallows ``out`` and returns a tensor of its own."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if output_scale is not None:
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse)
