"""Prefills that are right until a batch has a model's heads, rows or chunks."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX


@known_defect("chunked-context-of-64-chunks", killed_by="model_shapes")
class SixtyFourChunks(EagerPrefillBackend):
    """There is room for 64 chunks of a context; a later one leaves an empty state."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        return (output, lse) if chunk_idx < 64 else (output * 0.0, torch.full_like(lse, -torch.inf))


@known_defect("output-index-in-two-bytes", killed_by="model_shapes")
class OutputIndexInTwoBytes(EagerPrefillBackend):
    """Rows times heads are counted in two bytes; what lies beyond 65,536 of them is not written."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output.flatten(0, 1)[65536:] = 0.0
        return output, lse


@known_defect("lse-of-256-rows-with-many-heads", killed_by="lse")
class LseOf256Rows(EagerPrefillBackend):
    """With more than 16 heads only the first 256 rows of new tokens get their LSE, others that of row 0."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if causal and self.num_heads > 16:
            lse[:, 256:] = lse[:, :1]
        return output, lse


@known_defect("merge-grid-of-8192-heads", killed_by="merge_states")
class MergeGrid(EagerPrefillBackend):
    """The merge has 8192 blocks, one for each row and head; what lies beyond keeps the later part."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        super().merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
        output.view(-1, output.shape[-1])[8192:] = suffix_output.flatten(0, 1)[8192:].to(output.dtype)


@known_defect("quant-output-unsaturated-with-lse", killed_by="quant_output_fp8")
class UnsaturatedBesideTheLse(EagerPrefillBackend):
    """The kernel that also returns the LSE stores NaN where a code should be saturated."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self._saturates = not return_softmax_lse
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)

    def _quantise(self, accumulated, output_scale):
        if self._saturates:
            return super()._quantise(accumulated, output_scale)
        scaled = accumulated / output_scale
        return scaled.masked_fill(scaled.abs() > E4M3_MAX, torch.nan).to(torch.float8_e4m3fn)


@known_defect("quant-output-unscaled-after-512-rows", killed_by="quant_output_fp8")
class UnscaledRows(EagerPrefillBackend):
    """The scale reaches the codes of the first 512 rows only."""

    def _quantise(self, accumulated, output_scale):
        codes = super()._quantise(accumulated, output_scale)
        rest = super()._quantise(accumulated[512:], torch.ones_like(output_scale))
        return torch.cat([codes[:512].view(torch.uint8), rest.view(torch.uint8)]).view(codes.dtype)


@known_defect("fp8-operands-of-16-heads", killed_by="fp8_operands")
class SixteenHeadsOfCodes(EagerPrefillBackend):
    """Keys in e4m3 are loaded for 16 heads; the others read those of the first 16."""

    def _widened(self, x):
        wide = super()._widened(x)
        heads = torch.arange(x.shape[1], device=x.device) % 16
        return wide if wide is x else wide[:, heads]


@known_defect("wide-heads-stop-at-1024-keys", killed_by="mla_dims")
class WideHeadsStop(EagerPrefillBackend):
    """For heads of 256 columns the loop over key tiles ends after 1024 keys."""

    def _attend(self, q, k, v, causal):
        keys = slice(1024 if q.shape[-1] == 256 else None)
        return super()._attend(q, k[keys], v[keys], causal)


@known_defect("fp16-finite-sentinel-of-the-maximum", killed_by="shift_invariance")
class HalfSentinel(EagerPrefillBackend):
    """In fp16 the running maximum of the raw scores starts at -65504, the least number of that dtype."""

    def _initial(self, q, v):
        state = super()._initial(q, v)
        if q.dtype is not torch.float16:
            return state
        return state._replace(maximum=state.maximum.clamp(min=-65504 * self.scale))
