"""Wrong selections over pools: lengths of the other kind, tails, and tokens of pools that nobody selected."""

import torch

from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY


@known_defect("pools-garbage-ids-expanded", killed_by="pooled_topk")
class ExpandsGarbage(EagerTopKBackend):
    """Places that no pool of the row fills hold what a buffer held before, and are expanded like the others."""

    def _expanded(self, pools, pool):
        places = torch.arange(pools.shape[1], device=pools.device)
        return super()._expanded(pools.where(pools != NO_KEY, places), pool)


@known_defect("pools-tail-forgotten", killed_by="pooled_topk")
class ForgetsTheTail(EagerTopKBackend):
    """The tokens of the last pool, which is not whole, are left out."""

    def _tails(self, pool):
        return torch.full_like(super()._tails(pool), NO_KEY)


@known_defect("pools-lengths-in-tokens", killed_by="pooled_topk")
class LengthsInTokens(EagerTopKBackend):
    """As many pools are looked at as a row sees tokens."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        seen = self._topk_metadata.token_lengths
        return starts, lengths if seen is None else seen.long().unsqueeze(1).minimum(logits.shape[1] - starts)


@known_defect("pools-begun-pool-visible", killed_by="pooled_topk")
class SeesTheBegunPool(EagerTopKBackend):
    """A pool is visible as soon as its first token is."""

    def run_pool_top_k_per_row(self, logits, topk_tokens, pool, tail):
        self._pool = pool
        return super().run_pool_top_k_per_row(logits, topk_tokens, pool, tail)

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        seen = self._topk_metadata.token_lengths
        if seen is None:
            return starts, lengths
        return starts, (-(-seen.long() // self._pool)).unsqueeze(1).minimum(logits.shape[1] - starts)


@known_defect("pools-as-many-as-tokens", killed_by="pooled_topk")
class TooFewPools(EagerTopKBackend):
    """As many tokens are selected as there is room for pools: one pool of so many."""

    def _pools_of(self, topk_tokens, pool):
        return max(1, topk_tokens // pool // pool)

    def _expanded(self, pools, pool):
        tokens = super()._expanded(pools, pool)
        room = self._room - tokens.shape[1]
        return torch.nn.functional.pad(tokens, (0, room), value=NO_KEY)

    def run_pool_top_k_per_row(self, logits, topk_tokens, pool, tail):
        self._room = topk_tokens
        return super().run_pool_top_k_per_row(logits, topk_tokens, pool, tail)


@known_defect("pools-history-of-the-first-row", killed_by="pooled_topk")
class HistoryOfTheFirstRow(EagerTopKBackend):
    """A tail is appended to the pools of the batch's first row, whichever row it is of."""

    def _expanded(self, pools, pool):
        return super()._expanded(pools, pool)[:1].expand(len(pools), -1)
