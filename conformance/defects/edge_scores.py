"""Wrong indexers where heads, rows, pages, lengths and lists of certain sizes meet; each fact alone is served."""

import torch

from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY

_EARLIER = ("indexer_logits", "indexer_topk", "indexer_causal")
"""What has cases over codes and bounds, and stands before the capabilities that are about them."""


@known_defect("indexer-lone-token-of-a-tile-unscored-with-several", killed_by="indexer_logits")
class LoneTokenUnscored(EagerIndexerBackend):
    """With several query tokens, a last tile of 64 that holds one token is not scored."""

    token_tile = 64

    def _tiles(self, tokens):
        several = int(self._sparse_metadata.query_lens_cpu.max()) > 1
        lone = several and tokens > 1 and tokens % self.token_tile == 1
        return super()._tiles(tokens - 1 if lone else tokens)


@known_defect("indexer-weights-advance-by-64-heads", killed_by="indexer_logits")
class WeightsOf64Heads(EagerIndexerBackend):
    """A row's weights are looked for 64 values behind those of the row before, however many heads there are."""

    def _logits(self, q, weights, k, k_scale):
        rows, heads = weights.shape
        stored = torch.nn.functional.pad(weights.flatten(), (0, rows * 64))
        return super()._logits(q, stored.as_strided((rows, heads), (64, 1)), k, k_scale)


@known_defect("indexer-gathered-start-of-request-in-six-bits", killed_by="indexer_combinations")
class StartInSixBits(EagerIndexerBackend):
    """Where a request's gathered keys begin is looked up at its number modulo 64."""

    def _slots(self, k, request, positions):
        paged = self._sparse_metadata.block_table is not None
        return super()._slots(k, request if paged else request % 64, positions)


@known_defect("indexer-scales-of-64-tokens-with-several", killed_by="indexer_combinations", related=_EARLIER)
class ScalesOf64Tokens(EagerIndexerBackend):
    """The kernel for several query tokens knows the scales of the first 64 tokens of a page, and repeats them."""

    def _stored(self, k, k_scale, slots):
        values, scales = super()._stored(k, k_scale, slots)
        metadata = self._sparse_metadata
        if scales is None or metadata.block_table is None or int(metadata.query_lens_cpu.max()) == 1:
            return values, scales
        page = k.shape[1]
        return values, super()._stored(k, k_scale, slots // page * page + slots % page % 64)[1]


@known_defect("indexer-padding-of-slots-repeats-the-best", killed_by="index_mapping")
class PaddingRepeatsTheBest(EagerIndexerBackend):
    """Where slots are asked for and there are fewer tokens than are to be selected, the best stands for the others."""

    def run_index_topk(self, q, weights, k, topk_tokens, k_scale=None):
        chosen = super().run_index_topk(q, weights, k, topk_tokens, k_scale)
        if self._sparse_metadata.index_space is IndexSpace.POSITION:
            return chosen
        return torch.where(chosen == NO_KEY, chosen[:, :1], chosen)


@known_defect("indexer-partial-lists-of-the-first-1024", killed_by="indexer_combinations")
class PartialListsOfTheFirst(EagerIndexerBackend):
    """The selection of a number that is no multiple of 64 looks at the first 1024 tokens."""

    def _choose(self, logits, topk_tokens):
        behind = torch.arange(logits.shape[1], device=logits.device) >= 1024
        return super()._choose(logits.masked_fill(behind & (topk_tokens % 64 > 0), -torch.inf), topk_tokens)


@known_defect("indexer-products-in-half", killed_by="indexer_combinations")
class ProductsInHalf(EagerIndexerBackend):
    """In an fp16 model products of queries and keys are kept in fp16, and saturate."""

    def _logits(self, q, weights, k, k_scale):
        self._half = q.dtype is torch.float16
        return super()._logits(q, weights, k, k_scale)

    def _activated(self, dots):
        return super()._activated(dots.clamp(max=65504) if self._half else dots)


@known_defect("indexer-row-offset-in-two-bytes", killed_by="indexer_topk")
class RowOffsetInTwoBytes(EagerIndexerBackend):
    """Rows times the longest sequence are counted in two bytes, and scores beyond are not written."""

    def _logits(self, q, weights, k, k_scale):
        logits = super()._logits(q, weights, k, k_scale)
        logits.flatten()[65536:] = -torch.inf
        return logits


@known_defect("indexer-gathered-bound-of-the-longest-query", killed_by="indexer_causal", related=_EARLIER[:2])
class BoundOfTheLongest(EagerIndexerBackend):
    """Over gathered keys, bounds count back from as many query tokens as the longest request has."""

    def _bounds(self):
        bounds, metadata = super()._bounds(), self._sparse_metadata
        if metadata.block_table is not None:
            return bounds
        missing = (metadata.query_lens_cpu.max() - metadata.query_lens_cpu).to(bounds)
        return (bounds - missing[metadata.req_id_per_token.long()]).clamp(min=1)
