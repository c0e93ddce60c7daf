"""Features that are declared supported and then fail: configurations, a merge of one's own, operands in e4m3."""

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.bases import HopperE4M3Operands
from mla_conformance.defects.known import known_defect


@known_defect("prefill-backend-pins-cutlass-unsupported-dims", killed_by="mla_dims")
class NoKernelForGlm(EagerPrefillBackend):
    """GLM's head dims are declared supported, and the dispatch table lacks them."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if v.shape[-1] == 256:
            raise RuntimeError("no kernel for head dims (256, 256)")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("trtllm-gen-missing-cubin-after-selection", killed_by="mla_dims")
class MissingCubin(EagerPrefillBackend):
    """Selection accepts head dims for which no binary was shipped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if (self.qk_nope_head_dim, self.qk_rope_head_dim) == (64, 64):
            raise RuntimeError("missing cubin")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("nope-mla-rotary-none-crash", killed_by="mla_dims")
class NeedsRotary(EagerPrefillBackend):
    """A model without RoPE has no rotary embedding, and the backend asks it for one."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.qk_rope_head_dim == 0:
            raise AttributeError("'NoneType' object has no attribute 'cos_sin_cache'")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("missing-template-instantiation", killed_by="head_counts")
class NoInstanceForTwentyHeads(EagerPrefillBackend):
    """One number of heads has no template instance."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.num_heads == 20:
            raise RuntimeError("no template instance for 20 heads")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("ragged-sm90-ima-total-16384", killed_by="token_counts")
class Beyond16384Tokens(EagerPrefillBackend):
    """A batch of 16,384 tokens or more reads out of bounds."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if query_start_loc[-1] >= 2**14:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("tma-short-tail-descriptor-flag", killed_by="new_tokens")
class ShortTail(EagerPrefillBackend):
    """A long request followed by a tail of one token fails: the tail's descriptor keeps a stale flag."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal and query_start_loc[-1] > 256 and query_start_loc[-1] - query_start_loc[-2] == 1:
            raise RuntimeError("CUDA error: misaligned address")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("tma-odd-stride-illegal", killed_by="strided_inputs")
class OddStrides(EagerPrefillBackend):
    """A row stride that is no multiple of 16 bytes cannot be described, and is not checked for."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if any(x.stride(1) * x.element_size() % 16 for x in (q, k, v)):
            raise RuntimeError("failed to initialise the TMA descriptor")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("merge-both-neg-inf-nan", killed_by="merge_states")
class UnguardedMerge(EagerPrefillBackend):
    """Two rows without keys are merged with exp(-inf - -inf), which is not a number."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        largest = torch.maximum(prefix_lse, suffix_lse)
        weights = [(part - largest).exp() for part in (prefix_lse, suffix_lse)]
        total = weights[0] + weights[1]
        shares = [(weight / total).mT.unsqueeze(-1) for weight in weights]
        output.copy_(shares[0] * prefix_output.float() + shares[1] * suffix_output.float())
        if output_lse is not None:
            output_lse.copy_(largest + total.log())


class _Merge(EagerPrefillBackend):
    """Both weights as a merge computes them, 0 where neither part has a key."""

    def _weight(self, lse: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return (lse - largest.masked_fill(largest == -torch.inf, 0.0)).exp().mT.unsqueeze(-1)


@known_defect("merge-writes-lse-before-it-is-read", killed_by="merge_states")
class LseBeforeWeights(_Merge):
    """The merged LSE is written before the weights are computed, from the prefix's, which may be the same tensor."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        merged = torch.logaddexp(prefix_lse, suffix_lse)
        if output_lse is not None:
            output_lse.copy_(merged)
        weights = [self._weight(part, merged) for part in (prefix_lse, suffix_lse)]
        output.copy_(weights[0] * prefix_output.float() + weights[1] * suffix_output.float())


@known_defect("merge-clears-its-output-first", killed_by="merge_states")
class ClearsItsOutput(_Merge):
    """The output is cleared before both parts are added to it, the prefix too where that is the same tensor."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        merged, sums = torch.logaddexp(prefix_lse, suffix_lse), torch.zeros_like(output, dtype=torch.float32)
        output.zero_()
        for part, lse in ((prefix_output, prefix_lse), (suffix_output, suffix_lse)):
            sums += self._weight(lse, merged) * part.float()
        output.copy_(sums)
        if output_lse is not None:
            output_lse.copy_(merged)


@known_defect("hopper-fp8-accumulator-keeps-13-bits", killed_by="fp8_operands")
class AccumulatesIn22Bits(HopperE4M3Operands):
    """Sums of e4m3 products keep 13 bits behind the point where float32 is declared."""

    declaration = Declaration(e4m3_rounding=Rounding(p=Precision.SCALED_E4M3), emulated=True)


@known_defect("e4m3fn-codes-read-as-e4m3fnuz", killed_by="fp8_operands", related=("quant_output_fp8",))
class ReadsFnuzCodes(EagerPrefillBackend):
    """Codes of e4m3fn are read as e4m3fnuz: half of each value, and -0 is NaN."""

    def _widened(self, x):
        return super()._widened(x.view(torch.float8_e4m3fnuz) if x.dtype == torch.float8_e4m3fn else x)
