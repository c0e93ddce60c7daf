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
