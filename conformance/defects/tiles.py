"""Tiles and splits in which a row sees no key: what they leave in the running state of its softmax."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.online_softmax import OnlineSoftmax, SoftmaxState
from mla_conformance.defects.bases import EagerLayer, SplitDecode, joined
from mla_conformance.defects.known import known_defect


class LiftedMaximum(OnlineSoftmax):
    """A tile without a visible key raises the running maximum to 0, below which weights of far logits vanish."""

    def _accumulate(self, state, scores, v):
        empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        lifted = torch.where(empty, state.maximum.clamp(min=0.0), state.maximum)
        decay = torch.where(empty, (state.maximum - lifted).exp(), 1.0)
        return super()._accumulate(SoftmaxState(lifted, state.total * decay, state.weighted * decay), scores, v)


@known_defect("decode-tile-of-32-without-keys-raises-maximum", killed_by="decode_multi_token")
class DecodeLifts32(LiftedMaximum, EagerDecodeBackend):
    """A decode's tile of 32 tokens of which a query token sees none raises its running maximum to 0."""

    key_tile = 32


@known_defect("decode-tile-of-64-without-keys-raises-maximum", killed_by="decode_multi_token")
class DecodeLifts64(LiftedMaximum, EagerDecodeBackend):
    """A decode's tile of 64 tokens of which a query token sees none raises its running maximum to 0."""

    key_tile = 64


@known_defect("decode-tile-of-128-without-keys-raises-maximum", killed_by="decode_multi_token")
class DecodeLifts128(LiftedMaximum, EagerDecodeBackend):
    """A decode's tile of 128 tokens of which a query token sees none raises its running maximum to 0."""


@known_defect("prefill-tile-of-64-without-keys-raises-maximum", killed_by="logit_range")
class PrefillLifts64(LiftedMaximum, EagerPrefillBackend):
    """A prefill's tile of 64 keys of which a row sees none raises its running maximum to 0."""

    key_tile = 64


@known_defect("prefill-tile-of-128-without-keys-raises-maximum", killed_by="logit_range")
class PrefillLifts128(LiftedMaximum, EagerPrefillBackend):
    """A prefill's tile of 128 keys of which a row sees none raises its running maximum to 0."""


@known_defect("sparse-tile-of-32-without-keys-raises-maximum", killed_by="sparse_combinations")
class SparseLifts32(LiftedMaximum, EagerSparseBackend):
    """A tile of 32 columns in which a list names no key raises the row's running maximum to 0."""

    key_tile = 32


@known_defect("sparse-tile-of-64-without-keys-raises-maximum", killed_by="sparse_combinations")
class SparseLifts64(LiftedMaximum, EagerSparseBackend):
    """A tile of 64 columns in which a list names no key raises the row's running maximum to 0."""

    key_tile = 64


@known_defect("sparse-tile-of-128-without-keys-raises-maximum", killed_by="sparse_combinations")
class SparseLifts128(LiftedMaximum, EagerSparseBackend):
    """A tile of 128 columns in which a list names no key raises the row's running maximum to 0."""


@known_defect("layer-tile-without-keys-raises-maximum", killed_by="mixed_batch")
class LayerLifts(EagerLayer):
    """A layer's prefill has tiles of 64 keys; one of which a row sees none raises its running maximum to 0."""

    prefill_backend = PrefillLifts64


@known_defect("decode-split-without-keys-weighs-as-a-logit-of-0", killed_by="decode_lse")
class EmptySplitWeighs(SplitDecode):
    """A split of 64 tokens of which a query token sees none takes the weight exp(0) beside the others."""

    split = 64

    def _part(self, state):
        empty = state.total == 0
        return state._replace(maximum=state.maximum.masked_fill(empty, 0.0), total=state.total.masked_fill(empty, 1.0))


@known_defect("decode-split-without-keys-repeats-the-one-before", killed_by="decode_lse")
class EmptySplitRepeats(SplitDecode):
    """Where a query token sees nothing of a split of 64 tokens, the state of the split before is counted again."""

    split = 64

    def _combine(self, parts):
        filled = list(parts)
        for number in range(1, len(filled)):
            empty = filled[number].total == 0
            pairs = zip(filled[number - 1], filled[number], strict=True)
            filled[number] = SoftmaxState(*(torch.where(empty, before, own) for before, own in pairs))
        return super()._combine(filled)


@known_defect("sparse-tile-without-keys-weighs-as-a-logit-of-0", killed_by="sparse_decode")
class EmptyTileWeighs(EagerSparseBackend):
    """A later tile of 64 columns in which a list names no key adds a weight of exp(0) to the row's sum."""

    key_tile = 64

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state, scores, v)
        behind = (scores == -torch.inf).all(dim=-1, keepdim=True) & (state.total > 0)
        zero, one = torch.zeros_like(later.total), torch.ones_like(later.total)
        weighed = joined(later, SoftmaxState(zero, one, torch.zeros_like(later.weighted)))
        return SoftmaxState(*(torch.where(behind, a, b) for a, b in zip(weighed, later, strict=True)))
