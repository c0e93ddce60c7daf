"""Split keys that are combined wrongly: overflow, uninitialised or stale partials, 0 × NaN."""

from functools import reduce

import torch

from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.known import known_defect
from mla_conformance.defects.split_keys import SplitDecode, joined


@known_defect(
    "cutlass-mla-splitkv-lse-overflow-large-q",
    killed_by="decode",
    sources=(
        "NVIDIA/cutlass#2274",
        "sgl-project/sglang#6101",
    ),
)
class UnshiftedCombination(SplitDecode):
    """Splits are weighted by the exponential of their LSE without subtracting the largest, which overflows."""

    split = 128

    def _combine(self, parts):
        if len(parts) == 1:
            return parts[0]
        factors = [part.maximum.exp() for part in parts]
        total = sum(part.total * factor for part, factor in zip(parts, factors, strict=True))
        weighted = sum(part.weighted * factor for part, factor in zip(parts, factors, strict=True))
        return SoftmaxState(torch.zeros_like(total), total, weighted)


@known_defect(
    "splitk-reduce-pow2-padding-uninit",
    killed_by="decode",
    sources=(
        "flashinfer-ai/flashinfer#4018",
        "flashinfer-ai/flashinfer#3959",
    ),
)
class PaddedReduction(SplitDecode):
    """The reduction runs over a power of two of splits, and the outputs of those that do not exist are garbage."""

    split = 128

    def _combine(self, parts):
        state = super()._combine(parts)
        exact = len(parts) & (len(parts) - 1) == 0
        return state if exact else state._replace(weighted=state.weighted + 0.0 * torch.nan)


@known_defect(
    "window-stage2-merges-empty-splits",
    killed_by="decode",
    sources=("vllm-project/vllm#47188",),
)
class LeftoverPartials(SplitDecode):
    """All four slots of partials are combined, although a short request fills the first ones only."""

    slots = 4

    def _share(self, seq_len):
        return max(128, -(-seq_len // self.slots))

    def _combine(self, parts):
        scratch = self.__dict__.setdefault("scratch", {})
        for slot, part in enumerate(parts):
            scratch[slot, part.total.shape] = part
        return reduce(joined, [part for (_, shape), part in scratch.items() if shape == parts[0].total.shape])


@known_defect(
    "mtp-split-fully-causal-masked-zero-times-nan",
    killed_by="decode_multi_token",
    related=("decode_lse",),
    sources=("ROCm/aiter#4711",),
)
class NanOfAMaskedSplit(SplitDecode):
    """A split that an early query token does not see at all leaves 0 / 0, which is combined with the weight 0."""

    split = 64

    def _part(self, state):
        return state._replace(weighted=state.weighted / state.total * state.total)


@known_defect(
    "trtllm-workspace-not-zero-initialised",
    killed_by="decode",
    sources=("flashinfer-ai/flashinfer#1463",),
)
class DirtyWorkspace(SplitDecode):
    """Where several blocks work on a sequence, they add to a workspace that nobody has zeroed."""

    def _combine(self, parts):
        state = super()._combine(parts)
        return state._replace(weighted=state.weighted + 1e3) if len(parts) > 1 else state


@known_defect(
    "splitk-nan-nondeterministic-at-splits-16",
    killed_by="determinism",
    sources=("ROCm/aiter#4350",),
)
class RacySixteenSplits(SplitDecode):
    """With sixteen splits the reduction is a race that is lost every other time."""

    split = 96

    def _combine(self, parts):
        state = super()._combine(parts)
        if len(parts) != 16:
            return state
        self.races = getattr(self, "races", 0) + 1
        return state if self.races % 2 else state._replace(weighted=state.weighted * torch.nan)
