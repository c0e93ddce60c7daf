"""What an engine calls of attention to selected keys: lists over caches, and over gathered keys. No torch."""

from mla_conformance.cases.grammar import Fields, Listed, for_capability, with_fields
from mla_conformance.models.profile import Indexer, Selection
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.roles.indexer.case import best, scores
from mla_conformance.roles.sparse.case import decode, prefill, single

_FEWEST_KERNEL_HEADS = 64
"""Heads that engines fill up to where a sparse kernel takes no fewer (vLLM, ``_compute_fp8_decode_padded_heads``)."""


def sparse_decodes(selection: Selection, layout: str, common: Fields) -> Listed:
    """Lists over a cache, and over a second one if there is one; those of packed codes also with heads filled up."""
    scales = {"scales": "pow2"} if layout == "fp8_ds_mla" else {}
    fixed = {**common, "cache": layout, "topk": selection.topk, **_sinks(selection), **scales}
    seconds: list[Fields] = [{"extra": layout, "extra_topk": columns} for columns in selection.second] or [{}]
    for second in seconds:
        yield from with_fields(_lists(selection.topk, layout, bool(second)), {**fixed, **second})
    if selection.second:
        yield from with_fields(_few_lists(selection.topk, layout), fixed)
    if layout == "fp8_ds_mla":
        yield from with_fields(_few_lists(selection.topk, layout), {**fixed, "scales": "float32"})
    if common["heads"] < _FEWEST_KERNEL_HEADS and layout in TILED_FORMATS:
        filled_up = {**fixed, **seconds[0], "heads": _FEWEST_KERNEL_HEADS}
        yield from with_fields(_lists(selection.topk, layout, bool(seconds[0])), filled_up)


def _lists(topk: int, layout: str, second: bool) -> Listed:
    yield from _few_lists(topk, layout)
    yield from _batches(topk, layout)
    yield from _forms(topk)
    if second:
        yield "second_cache", single(300, 64, 1000, data="needle", fill="ragged", lse=False)
    yield "cuda_graph", single(1000, 64, 300, 129, data="needle", lse=False)


def _plain(layout: str) -> str:
    """The capability that lists over a layout decide."""
    return "sparse_decode" if layout == "auto" else f"sparse_{layout}"


def _few_lists(topk: int, layout: str) -> Listed:
    """Requests with fewer keys than columns, and with more."""
    yield _plain(layout), single(64, 5, 1000, 17, data="needle", lse=False)
    yield _plain(layout), single(topk + 500, 40, data="hot_tail", lse=False)
    yield "sparse_lse", single(64, 9, topk - 1)
    yield "selection_padding", decode((1, 2), (300, 0), data="needle", lse=False)


def _batches(topk: int, layout: str) -> Listed:
    """As many keys as columns, one more, one fewer; several query tokens; regimes; pages."""
    return for_capability(
        _plain(layout),
        single(topk - 2, topk - 1, topk, data="needle"),
        single(3 * topk, data="needle"),
        decode((2, 2), (topk + 60, 63), data="needle"),
        single(300, 40, data="outliers"),
        single(300, 40, data="large_logits"),
        single(300, 40, data="tiny_values"),
        single(300, 40, data="hot_ones"),
        single(*(17, 63, 64, 130) * 6, data="needle"),
        single(200, 9, layers=2, data="needle"),
        single(130, 70, page=128, data="needle"),
        single(130, 70, tails="huge", poison="inf", data="needle"),
        single(130, 9, pad=3, data="needle"),
        decode((3, 1, 2), (60, 5, 300), data="needle"),
        lse=False,
    )


def _forms(topk: int) -> Listed:
    """Holes, order and lengths of lists, the LSE, and keys that no list names."""
    scattered = decode((3, 4), (300, 64), data="needle", fill="ragged", holes="scattered", lse=False)
    yield "selection_padding", scattered
    yield "selection_order", single(300, 64, data="needle", order="ascending", lse=False)
    yield "sparse_lse", single(64)
    yield "sparse_lse", single(300, 40, data="large_logits")
    yield "selection_length", single(300, 64, length=True, fill="ragged", behind="huge", lse=False)
    yield "unselected_keys", single(topk + 300, 70, unselected="poison", fill="ragged", data="needle", lse=False)


def sparse_prefills(selection: Selection, common: Fields) -> Listed:
    """Lists over gathered keys; those of a second cache are gathered behind the others."""
    columns = selection.topk + max(selection.second, default=0)
    fixed = {**common, "topk": columns, **_sinks(selection)}
    yield from with_fields(_gathered(columns), fixed)
    if common["heads"] < _FEWEST_KERNEL_HEADS:
        yield from with_fields(_gathered(columns), {**fixed, "heads": _FEWEST_KERNEL_HEADS})


def _gathered(topk: int) -> Listed:
    yield "sparse_prefill", prefill((5, 9), (0, 300), data="needle")
    yield "sparse_prefill", prefill((2,), (topk + 300,), data="hot_tail")
    yield "sparse_lse", prefill((5, 2), (64, 300), lse=True)
    yield "sparse_prefill", prefill((40,), (200,), data="needle")
    yield "sparse_prefill", prefill((3,), (topk - 2,), data="needle")
    yield "sparse_prefill", prefill((9, 3), (100, 40), data="large_logits")
    yield "sparse_prefill", prefill((9,), (100,), data="outliers")
    yield "sparse_prefill", prefill((20, 19, 1), (40, 0, 7), data="needle")
    yield "sparse_lse", prefill((7,), (64,), fill="ragged", holes="scattered", lse=True)
    yield "selection_padding", prefill((7, 9), (0, 200), fill="ragged", data="needle")
    yield "selection_length", prefill((3, 4), (300, 64), fill="ragged", length=True, behind="huge")


def _sinks(selection: Selection) -> Fields:
    return {"sink": "drawn"} if selection.sinks else {}


def indexing(indexer: Indexer) -> Listed:
    """Over pages, and over gathered keys."""
    dims = f"{indexer.head_dim}-0-{indexer.head_dim}-{indexer.head_dim}"
    fixed = {"dims": dims, "heads": indexer.heads, "topk": indexer.topk}
    yield from with_fields(_scores(), fixed)
    yield from with_fields(_best(indexer.topk), fixed)
    yield from with_fields(_special(indexer.topk), fixed)


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
