"""Wrong indexers: scores, bounds, what is selected of them, and how it is told."""

import torch

from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY

_EARLIER = ("indexer_logits", "indexer_topk", "indexer_causal")
"""What has cases over codes, and stands before the capability that is about them."""


@known_defect("indexer-bound-off-by-one", killed_by="indexer_causal", related=("indexer_topk",))
class SeesTheNextToken(EagerIndexerBackend):
    """A row sees one token too many, the first behind its own."""

    def _bounds(self):
        metadata = self._sparse_metadata
        lengths = metadata.seq_lens[metadata.req_id_per_token.long()]
        return torch.minimum(super()._bounds() + 1, lengths)


@known_defect("indexer-relu-dropped", killed_by="indexer_logits")
class WithoutActivation(EagerIndexerBackend):
    """Products below zero count, as if the heads had no activation."""

    def _activated(self, dots):
        return dots


@known_defect("indexer-weights-of-another-head", killed_by="indexer_logits")
class WeightsOfTheNextHead(EagerIndexerBackend):
    """Each head is weighted as the next one should be."""

    def _scores(self, q, weights, keys):
        return super()._scores(q, weights.roll(1, dims=1), keys)


@known_defect("indexer-activation-behind-the-sum", killed_by="indexer_logits")
class ActivatesTheSum(EagerIndexerBackend):
    """The activation is taken of the weighted sum over heads, not of each head."""

    def _scores(self, q, weights, keys):
        return super()._scores(q, weights, keys).relu()

    def _activated(self, dots):
        return dots


@known_defect("indexer-key-scale-ignored", killed_by="indexer_fp8", related=_EARLIER)
class IgnoresTheScale(EagerIndexerBackend):
    """Codes of keys are multiplied as they are, without the scale of their token."""

    def _scales(self, scales):
        return torch.ones_like(scales)


@known_defect("indexer-one-key-scale", killed_by="indexer_fp8", related=_EARLIER)
class OneScaleForATile(EagerIndexerBackend):
    """All tokens of a tile are read under the scale of its first one."""

    def _scales(self, scales):
        return scales[:1].expand_as(scales)


@known_defect("indexer-token-twice", killed_by="indexer_topk")
class SelectsTheBestTwice(EagerIndexerBackend):
    """Two blocks select the best token both, and the merge drops the last one for it."""

    def _choose(self, logits, topk_tokens):
        chosen = super()._choose(logits, topk_tokens)
        full = (chosen != NO_KEY).all(dim=1, keepdim=True)
        column = torch.arange(topk_tokens, device=chosen.device)
        return torch.where(full & (column == topk_tokens - 1) & (column > 0), chosen[:, :1], chosen)


@known_defect("indexer-tail-of-a-tile-forgotten", killed_by="indexer_logits")
class WholeTilesOnly(EagerIndexerBackend):
    """Tokens behind a request's last whole tile of 16 are not scored."""

    token_tile = 16

    def _tiles(self, tokens):
        return (tile for tile in super()._tiles(tokens) if tile.stop - tile.start == self.token_tile)


@known_defect("indexer-tail-not-selected", killed_by="indexer_topk")
class SelectsFromWholeTiles(EagerIndexerBackend):
    """The selection looks at whole tiles of 16 scores alone."""

    def _choose(self, logits, topk_tokens):
        whole = logits.isfinite().sum(dim=1, keepdim=True) // 16 * 16
        behind = torch.arange(logits.shape[1], device=logits.device) >= whole
        return super()._choose(logits.masked_fill(behind, -torch.inf), topk_tokens)


@known_defect("indexer-positions-for-slots", killed_by="index_mapping")
class PositionsForSlots(EagerIndexerBackend):
    """Positions are returned where slots were asked for."""

    def _numbers(self, k, positions):
        return positions


@known_defect("indexer-pages-of-another-size", killed_by="index_mapping")
class PagesOf64(EagerIndexerBackend):
    """Slots are computed as if every page held 64 tokens."""

    def _numbers(self, k, positions):
        pages = self._sparse_metadata.block_table is not None
        return super()._numbers(k.new_empty(k.shape[0], 64, 0) if pages else k, positions)


@known_defect("indexer-tables-of-64-requests", killed_by="indexer_logits")
class TablesOf64Requests(EagerIndexerBackend):
    """A block holds the tables of 64 requests, and from the 65th on those of the first ones are read again."""

    def _keys(self, k, k_scale, request, positions):
        return super()._keys(k, k_scale, request % 64, positions)


@known_defect("indexer-positions-of-17-bits", killed_by="indexer_topk")
class PositionsOf17Bits(EagerIndexerBackend):
    """A candidate is packed with 17 bits for its position, and no token from 131,072 on is selected."""

    def _choose(self, logits, topk_tokens):
        return super()._choose(logits[:, : 2**17], topk_tokens)


@known_defect("indexer-ties-with-the-last-dropped", killed_by="indexer_topk")
class DropsTies(EagerIndexerBackend):
    """Of the tokens that tie with the last one selected, a radix selection keeps a single one."""

    def _choose(self, logits, topk_tokens):
        chosen = super()._choose(logits, topk_tokens)
        scores = logits.gather(1, chosen.clamp(min=0))
        tied = (scores[:, 1:] == scores[:, -1:]) & (scores[:, :-1] == scores[:, -1:])
        chosen[:, 1:].masked_fill_(tied, NO_KEY)
        return chosen


@known_defect("indexer-ties-broken-by-who-comes-first", killed_by="determinism")
class TiesInAnyOrder(EagerIndexerBackend):
    """Now and then another block comes first to where the last of several equal tokens is selected."""

    def _choose(self, logits, topk_tokens):
        self.number = getattr(self, "number", 0) + 1
        chosen = super()._choose(logits, topk_tokens)
        if self.number % 7:
            return chosen
        last = logits.shape[1] - 1
        mirrored = super()._choose(logits.flip(1), topk_tokens)
        return torch.where(mirrored == NO_KEY, NO_KEY, last - mirrored)
