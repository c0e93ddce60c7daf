"""What an engine calls of an indexer: scores, and the best of them, all in codes. No torch."""

from mla_conformance.cases.indexer_caselists import best, scores
from mla_conformance.models.listed import Listed, having
from mla_conformance.models.profile import Indexer


def indexing(indexer: Indexer) -> Listed:
    """Over pages, and over gathered keys."""
    dims = f"{indexer.head_dim}-0-{indexer.head_dim}-{indexer.head_dim}"
    fixed = {"dims": dims, "heads": indexer.heads, "topk": indexer.topk}
    yield from having(_scores(), fixed)
    yield from having(_best(indexer.topk), fixed)
    yield from having(_special(indexer.topk), fixed)


def _scores() -> Listed:
    yield "indexer_logits", scores((1, 1, 1), (63, 5, 200))
    yield "indexer_logits", scores((3, 1, 2), (64, 5, 130))
    yield "indexer_logits", scores((1,), (3000,), data="large_logits")
    yield "indexer_logits", scores((70, 20), (0, 60), gathered=True)


def _best(topk: int) -> Listed:
    yield "indexer_topk", best((1, 1, 1), (63, 5, 200))
    yield "indexer_topk", best((1,), (topk + 452,), data="normal")
    yield "indexer_topk", best((1, 1, 1), (topk - 2, topk - 1, topk), data="normal")
    yield "indexer_topk", best((2, 3), (topk + 100, 63))
    yield "indexer_topk", best((90, 20), (0, 60), gathered=True)


def _special(topk: int) -> Listed:
    """Causality, coarse codes, and keys that are named by their slots."""
    yield "indexer_causal", best((8, 3), (57, 100))
    yield "indexer_causal", scores((8, 3), (57, 100))
    yield "indexer_fp8", scores((1, 2), (300, 40), data="outliers")
    yield "indexer_fp8", best((1, 1), (300, 40), data="rising")
    yield "index_mapping", best((1, 1), (topk + 50, 40), space="slot")
