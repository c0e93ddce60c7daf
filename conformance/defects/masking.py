"""Masks and running maxima: finite sentinels, rescaling that overflows."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.known import known_defect


@known_defect(
    "finite-neg-sentinel-rowmax-zeroes-row",
    killed_by="shift_invariance",
    sources=(
        "flashinfer-ai/flashinfer#4267",
        "flashinfer-ai/flashinfer#4450",
        "flashinfer-ai/flashinfer#4401",
    ),
)
class FiniteInitialMaximum(EagerPrefillBackend):
    """The running maximum of the raw scores starts at -5e4, so a row whose scores are all below it underflows to 0."""

    def _attend(self, q, k, v, causal):
        self._start = -5e4 * self.scale if k.shape[0] else -torch.inf
        return super()._attend(q, k, v, causal)

    def _initial(self, q, v):
        state = super()._initial(q, v)
        return state._replace(maximum=torch.full_like(state.maximum, self._start))


@known_defect(
    "masked-key-dominates-finite-mask-value",
    killed_by="shift_invariance",
    sources=(
        "ohdearquant/lattice#361",
        "ohdearquant/lattice#373",
    ),
)
class FiniteMask(EagerPrefillBackend):
    """Masked scores are -1e4, which is more than a valid score may be."""

    def _attend(self, q, k, v, causal):
        state = self._initial(q, v)
        for tile in self._tiles(k.shape[0]):
            scores = self._scores(q, k[tile])
            if causal:
                scores = scores.masked_fill(~self._visible(q.shape[0], k.shape[0], tile, q.device), -1e4)
            state = self._accumulate(state, scores, v[tile])
        return state


@known_defect(
    "lazy-rescale-wave-uniform-nan",
    killed_by="logit_range",
    sources=("ROCm/FlyDSL#1033",),
)
class MaximumOfTheTile(EagerPrefillBackend):
    """Rescaling takes the tile's maximum even where the running one is higher, and overflows for wide scores."""

    def _accumulate(self, state, scores, v):
        maximum = scores.amax(dim=-1, keepdim=True)
        maximum = torch.where(maximum == -torch.inf, state.maximum, maximum)
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp(), self._exp(scores - shift)
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)
