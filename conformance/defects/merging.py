"""A backend's own merge of partial states."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "merge-both-neg-inf-nan",
    killed_by="merge_states",
    sources=(
        "vllm-project/vllm#27491",
        "vllm-project/vllm#28181",
        "vllm-project/vllm#39148",
        "flashinfer-ai/flashinfer#4051",
        "flashinfer-ai/flashinfer#5262",
        "flashinfer-ai/flashinfer#4054",
    ),
)
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
