"""The cases that decide each capability of a sparse layer, the most telling first; see ``prefill_caselists``."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from mla_conformance.cases.case import Layout
from mla_conformance.cases.grammar import Fields, Lengths, each
from mla_conformance.roles.prepare.case import PAIRS

_TILES: dict[str, Any] = {"cache": "fp8_ds_mla", "dims": "32-64-32-512"}
_TWO = {"topk": 2, "index_heads": 2}


def step(q: Lengths, kv: Lengths, decodes: int = 0, **fields: Any) -> Fields:
    """A step of these requests, of which the first so many decode."""
    return {"call": "sparse_layer", "q": q, "kv": kv, "decodes": decodes, **fields}


def layers() -> Iterator[Fields]:
    """Decodes and prefills in one step or alone, several tokens of each, head counts, dtypes, strides, many pages."""
    yield step((1, 1, 9), (40, 70, 30), 2)
    yield step((20, 5), (0, 60))
    yield step((1, 1, 1), (40, 9, 130), 3)
    yield step((3, 2, 17), (70, 30, 5), 2)
    yield step((1, 30), (25, 0), 1, **_TILES, index_cache="auto")
    yield from (step((1, 6), (40, 20), 1, heads=heads) for heads in (1, 5, 16))
    yield step((1, 6), (40, 20), 1, dtype="fp16", index_heads=9, topk=16)
    yield from (step((1, 6), (40, 20), 1, layout=layout) for layout in (Layout.SLICED, Layout.ODD))
    yield step((1,) * 9, (40, 3, 70, 8, 9, 10, 20, 30, 66), 9)


def shortcuts() -> Iterator[Fields]:
    """As many tokens as are selected, one fewer, one more, of decodes and prefills, with an indexer and without."""
    yield step((1, 1, 1), (8, 7, 6), 3)
    yield step((9, 8), (0, 0))
    yield step((8,), (0,))
    yield step((9,), (0,))
    yield step((1, 5, 4), (3, 3, 40), 1)
    yield step((3, 3), (5, 6))
    yield step((1, 1), (0, 7), 2)
    yield step((2, 3, 1), (0, 0, 2), **_TWO)
    yield from each([step((9, 8), (0, 0)), step((1, 5), (8, 3), 1)], shared=True)


def shared_indices() -> Iterator[Fields]:
    """Layers without an indexer of their own."""
    yield step((1, 1, 9), (40, 70, 30), 2, shared=True)
    yield step((12, 5), (0, 60), shared=True)
    yield step((1, 1), (40, 100), 2, shared=True, **_TILES)
    yield step((1, 1, 4), (40, 70, 30), 2, shared=True, pad=3)


def conventions() -> Iterator[Fields]:
    """What is rotated together in the layer and in its indexer, in which columns; scales of either kind."""
    for pairs, rope_last, layer_pairs in product(PAIRS, (False, True), PAIRS):
        turned = {"pairs": pairs, "rope_last": rope_last, "layer_pairs": layer_pairs}
        yield step((1, 5), (38, 21), 1, **turned)
    yield step((1, 5), (38, 21), 1, dims="64-126-64-128", index_scales="pow2")


def caches() -> Iterator[Fields]:
    """Layouts of both caches, pages, what stands around the entries of a request, and rows of padding."""
    mixed: Any = (1, 1, 5), (63, 70, 59), 2
    yield step(*mixed, **_TILES, poison="large")
    yield step(*mixed, **_TILES, scales="pow2", index_scales="pow2")
    yield step(*mixed, index_cache="auto", layers=3, poison="inf")
    yield from (step(*mixed, page=page) for page in (16, 1, 128))
    yield from (step(*mixed, tails=tails, spare=40, poison="large") for tails in ("null", "minus", "huge"))
    yield step(*mixed, pad=3, layers=2)
    yield step(*mixed, pad=1, poison="large", **_TILES)


def ranks() -> Iterator[Fields]:
    """Decodes and prefills on ranks that share the heads: as many as heads, padding, codes, no indexer, a shortcut."""
    mixed: Any = (1, 1, 9), (40, 70, 30), 2
    yield step(*mixed, tp=2)
    yield step(*mixed, tp=4, pad=2)
    yield step((20, 5), (0, 60), heads=16, tp=8)
    yield step((1, 6), (40, 20), 1, heads=16, tp=4, index_heads=9, topk=16, index_cache="auto")
    yield step(*mixed, **_TILES, heads=16, tp=2, page=16)
    yield step(*mixed, tp=2, shared=True)
    yield step((9, 8), (0, 0), tp=2)


def models() -> Iterator[Fields]:
    """64 heads of attention and indexer, 2,048 tokens selected of a few more."""
    model = {"heads": 64, "index_heads": 64, "topk": 2048}
    yield step((1, 1), (40, 2300), 2, **model, **_TILES)
    yield step((1, 3), (30, 2046), 1, **model)
    yield step((1, 3), (30, 2046), 1, **model, shared=True)


def graphs() -> Iterator[Fields]:
    """The largest batch; the test captures it and replays it with others."""
    yield step((1,) * 4, (70, 30, 9, 40), 4)
    yield step((1,) * 4, (70, 30, 9, 40), 4, shared=True)
    yield step((1,) * 3, (70, 30, 9), 3, **_TILES)


def repeated() -> Iterator[Fields]:
    """Batches that are called again, changed or reordered."""
    yield step((1, 1, 1, 1), (40, 9, 70, 20), 4)
    yield step((5, 3, 9, 2), (30, 0, 11, 50))
    yield step((1, 1, 1, 1), (40, 9, 70, 20), 4, shared=True)
    yield step((1, 1, 1, 1), (40, 9, 70, 20), 4, tp=2)


def fenced() -> Iterator[Fields]:
    """Both caches and the buffer begin and end where memory does."""
    yield step((1, 1, 9), (40, 70, 30), 2)
    yield step((1, 5), (63, 20), 1, **_TILES, page=16)
