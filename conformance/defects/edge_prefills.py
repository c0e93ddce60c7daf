"""Wrong prefills where heads, lengths, layouts, codes and merges of certain kinds meet; each fact alone is served."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX

_TILE = 64


def _power_below(heads: int) -> int:
    """The largest power of two that is not above a number of heads."""
    return 1 << heads.bit_length() - 1


@known_defect("quant-output-odd-head-unscaled", killed_by="combinations")
class OddHeadUnscaled(EagerPrefillBackend):
    """Codes of an output are written for two heads at a time, and a last odd one is stored unscaled."""

    def _quantise(self, accumulated, output_scale):
        scale = output_scale.expand(accumulated.shape[1], 1).clone()
        if len(scale) > 1 and len(scale) % 2:
            scale[-1] = 1.0
        return super()._quantise(accumulated, scale)


@known_defect("quant-output-unsaturated-behind-a-power-of-two-of-heads", killed_by="combinations")
class PaddedHeadsUnsaturated(EagerPrefillBackend):
    """Heads behind the largest power of two store NaN where a code should be saturated."""

    def _quantise(self, accumulated, output_scale):
        scaled = accumulated / output_scale
        behind = torch.arange(scaled.shape[1], device=scaled.device).unsqueeze(1) >= _power_below(scaled.shape[1])
        lost = scaled.masked_fill(behind & (scaled.abs() > E4M3_MAX), torch.nan)
        return super()._quantise(lost, torch.ones_like(output_scale))


@known_defect("quant-output-lse-of-scaled-values", killed_by="quant_output_fp8")
class LseOfScaledValues(EagerPrefillBackend):
    """Beside a quantised output the logarithm of its scale is added to the LSE."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        if not return_softmax_lse or output_scale is None:
            return result
        return result[0], result[1] + output_scale.log()


@known_defect("merge-of-nothing-halves-the-odd-head", killed_by="combinations")
class OddHeadHalved(EagerPrefillBackend):
    """A last odd head gets half of its weight where it is merged with a part without keys."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        empty = (prefix_lse[-1] == -torch.inf).unsqueeze(-1)
        super().merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
        if len(suffix_lse) > 1 and len(suffix_lse) % 2:
            output[:, -1] = torch.where(empty, output[:, -1] / 2, output[:, -1])


@known_defect("merge-last-tile-of-rows-and-heads-keeps-the-suffix", killed_by="merge_states")
class MergeTail(EagerPrefillBackend):
    """Merged are whole tiles of 64 rows and heads, if there is one; what stands behind keeps the later part."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        super().merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
        first = max(_TILE, suffix_lse.numel() // _TILE * _TILE)
        output.view(-1, output.shape[-1])[first:] = suffix_output.flatten(0, 1)[first:].to(output.dtype)


@known_defect("fp8-operands-tail-of-heads-is-one-head", killed_by="combinations")
class TailOfHeadsOfCodes(EagerPrefillBackend):
    """Operands in e4m3 are loaded for 16 heads at a time; behind whole tiles one head stands for all others."""

    def _widened(self, x):
        wide, whole = super()._widened(x), x.shape[1] // 16 * 16
        heads = torch.arange(x.shape[1], device=x.device)
        return wide if wide is x or not whole else wide[:, heads.clamp(max=whole)]


@known_defect("prefill-empty-context-advances-odd-strides", killed_by="combinations")
class EmptyContextAdvances(EagerPrefillBackend):
    """In rows of an odd stride, a context without keys advances the values of the requests behind it by one."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        empty = [request for request, start in enumerate(key_start_loc[1:]) if start == key_start_loc[request]]
        if empty and v.stride(1) % 2:
            first = key_start_loc[empty[0]]
            v = torch.cat([v[:first], v[first:].roll(1, 0)])
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


class _Numbered(EagerPrefillBackend):
    """Knows the number of the request that it attends for."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self._request = -1
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    def _attend(self, q, k, v, causal):
        self._request += 1
        return super()._attend(q, k, v, causal)


@known_defect("prefill-lone-row-of-a-later-request-repeats-the-one-before", killed_by="new_tokens")
class LoneRowRepeats(_Numbered):
    """The one row in the last tile of 64 rows of a later request gets the result of the row before it."""

    def _attend(self, q, k, v, causal):
        state = super()._attend(q, k, v, causal)
        if self._request > 0 and len(q) > 1 and len(q) % _TILE == 1:
            for part in state:
                part[:, -1] = part[:, -2]
        return state


@known_defect("prefill-request-behind-an-empty-one-lost-after-32", killed_by="combinations")
class BehindAnEmptyRequest(_Numbered):
    """Starts are summed by 32 requests; in a later group the request behind one without tokens stays 0."""

    def _attend(self, q, k, v, causal):
        state = super()._attend(q, k, v, causal)
        if self._request > 32 and self._empty_before:
            state.weighted[:] = 0.0
        self._empty_before = not len(q)
        return state


@known_defect("prefill-raw-scores-in-half", killed_by="shift_invariance")
class RawScoresInHalf(EagerPrefillBackend):
    """In an fp16 model products of queries and keys are kept in fp16 before they are scaled, and saturate."""

    def _scores(self, q, k):
        scores = super()._scores(q, k)
        return scores.clamp(max=65504 * self.scale) if q.dtype is torch.float16 else scores


@known_defect("prefill-context-shorter-than-queries-masked", killed_by="lse")
class ShortContextMasked(EagerPrefillBackend):
    """Context that is shorter than the new tokens is masked as if it were the end of their own triangle."""

    def _attend(self, q, k, v, causal):
        return super()._attend(q, k, v, causal or len(k) < len(q))


@known_defect("prefill-float32-assumes-packed-keys", killed_by="combinations")
class Float32AssumesPackedKeys(EagerPrefillBackend):
    """The kernel for float32 takes the rows of keys to stand one behind the other, whatever their stride is."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if k.dtype is torch.float32:
            strides = (k.shape[1] * k.shape[2], k.shape[2], 1)
            k = k.as_strided(k.shape, strides, k.storage_offset())
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("context-chunk-behind-16-is-of-the-first-request", killed_by="fp8_operands")
class SixteenChunksOfMany(EagerPrefillBackend):
    """From chunk 16 on there is a place for one request; those behind it get an empty state."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        if chunk_idx >= 16:
            behind = int(self._prefill_metadata.query_start_loc[1])
            output[behind:], lse[:, behind:] = 0.0, -torch.inf
        return output, lse
