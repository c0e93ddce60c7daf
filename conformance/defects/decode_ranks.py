"""Ranks that share a sequence: bounds in local lengths, ranks and tiles without a visible key."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.known import known_defect


@known_defect(
    "dcp-empty-owner-zero-times-nan",
    killed_by="dcp",
    sources=(
        "ROCm/ATOM#1832",
        "local-inference-lab/b12x#116",
    ),
)
class NanOfARankWithoutKeys(EagerDecodeBackend):
    """A rank that holds no key of a request returns 0 / 0, which no factor of 0 removes from the sum."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        if self._decode_metadata.dcp_world_size > 1:
            output = output.masked_fill(lse.mT.unsqueeze(-1) == -torch.inf, torch.nan)
        return output, lse


@known_defect(
    "dcp-causal-mask-on-local-len",
    killed_by="dcp",
    sources=("lightseekorg/tokenspeed#364",),
)
class LocalBound(EagerDecodeBackend):
    """The causal bound counts the tokens of this rank back from its own last one."""

    def _visible(self, queries, request, seq_len, tile):
        last = torch.arange(seq_len - queries, seq_len).unsqueeze(1)
        return torch.arange(tile.start, tile.stop) <= last


@known_defect(
    "leading-masked-chunk-nan-poisons-row",
    killed_by="dcp",
    sources=("vllm-project/vllm#48366",),
)
class UnguardedMaximum(EagerDecodeBackend):
    """A first tile without a visible key leaves a maximum of -inf, and -inf minus -inf stays in the row for ever."""

    def _accumulate(self, state, scores, v):
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        decay = (state.maximum - maximum).exp().masked_fill(state.total == 0, 0.0)
        p = (scores - maximum).exp()
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)
