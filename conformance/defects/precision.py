"""Precision lost on the way: hidden FP8, lost mass, a factor on everything; fused quantised output."""

import math

import torch

from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.bases import declares
from mla_conformance.defects.known import known_defect

_VALUES = (
    "new_tokens",
    "lse",
    "mla_dims",
    "head_counts",
    "empty_rows",
    "context_chunk",
    "chunked_context",
    "merge_states",
)
"""Capabilities whose data show lost precision too."""


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype`` and back."""
    return x.to(dtype).to(x.dtype)


@known_defect("fp8-score-noise-compounds", killed_by="new_tokens")
class HiddenFp8Scores(EagerPrefillBackend):
    """Q and K are quietly rounded to e4m3."""

    def _scores(self, q, k):
        return super()._scores(_through(q, torch.float8_e4m3fn), _through(k, torch.float8_e4m3fn))


@known_defect("nvfp4-attn-fp8-scratch-subnormal-flush", killed_by="new_tokens")
class Fp8Scratch(EagerPrefillBackend):
    """The output passes through an e4m3 scratch buffer of unit scale."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return _through(output, torch.float8_e4m3fn), lse


@known_defect("sm120-nvfp4-correction-compact-vs-expanded", killed_by="new_tokens")
class UniformFactor(EagerPrefillBackend):
    """A wrong row sum scales the whole output by 0.9."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output * 0.9, lse


@known_defect("fa4-e4m3-excess-error", killed_by="new_tokens")
class E5M2Weights(EagerPrefillBackend):
    """P is rounded to e5m2 where e4m3 is declared."""

    declaration = declares(Rounding(p=Precision.SCALED_E4M3))

    def _round_p(self, p, dtype):
        return _through(p, torch.float8_e5m2)


@known_defect("fp8-p-underflow-mass-loss", killed_by="weights", related=_VALUES)
class UnscaledE4M3Weights(EagerPrefillBackend):
    """P is rounded to e4m3 without its scale of 2^8: the tail's weights vanish, the row sum counts them."""

    declaration = declares(Rounding(p=Precision.SCALED_E4M3))

    def _round_p(self, p, dtype):
        return _through(p, torch.float8_e4m3fn)


@known_defect("fp8-lazy-rescale-p-saturation", killed_by="weights", related=_VALUES)
class SaturatedWeights(EagerPrefillBackend):
    """The running maximum lags by up to 2^4, so P × 2^8 saturates in e4m3, while the row sum does not."""

    declaration = declares(Rounding(p=Precision.SCALED_E4M3))

    def _accumulate(self, state, scores, v):
        new = scores.amax(dim=-1, keepdim=True)
        keep = (new - state.maximum <= 4 * math.log(2)) & (state.maximum != -torch.inf)
        maximum = torch.where(keep, state.maximum, torch.maximum(state.maximum, new))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp(), (scores - shift).exp()
        stored = _through((p * 256).clamp(max=448), torch.float8_e4m3fn) / 256
        weighted = torch.einsum("nts,snv->ntv", stored, v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)


@known_defect("bmm-fp8-quant-inverted-scale", killed_by="quant_output_fp8")
class InvertedScale(EagerPrefillBackend):
    """The value is multiplied by the output scale instead of divided."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated, 1 / output_scale)


@known_defect("nan-spreads-across-rows-in-output-quant", killed_by="quant_output_fp8")
class PaddingSpreads(EagerPrefillBackend):
    """A maximum over all rows, poisoned padding included, enters every code."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        if output_scale is not None and q.isnan().any():
            out.copy_(torch.full(out.shape, torch.nan))
        return result


@known_defect("fp4-swizzled-scale-buffer-underallocated", killed_by="quant_output_fp8")
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


@known_defect("silent-noop-feature-on-fallback-backend", killed_by="out_tensor")
class IgnoresOut(EagerPrefillBackend):
    """A fallback kernel swallows ``out`` and returns a tensor of its own."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if output_scale is not None:
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse)
