"""The cases that decide each capability of a preparation, the most telling first; see ``prefill_caselists``."""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Layout
from mla_conformance.cases.grammar import Fields, Lengths, each
from mla_conformance.roles.prepare.case import VALUES

_FEW_HEADS = {"heads": 4}
_POW2 = {"scales": "pow2"}
_UNFOLDED = {"fold": False}
_WIDE = {"dims": "192-64-256-256", **_UNFOLDED, **_FEW_HEADS}
_UNTURNED = {"hadamard": False}


def tokens(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """So many tokens of each request, behind so many others."""
    return {"call": "prepare_index", "q": q, "kv": kv, **fields}


def whole() -> Iterator[Fields]:
    """Batches, heads, dtypes, memory layouts, padding."""
    yield tokens((1, 1, 1), (63, 5, 200))
    yield tokens((3, 1, 2), (0, 5, 130), **_POW2)
    yield tokens((40, 9), (0, 60), heads=32)
    yield tokens((1,) * 70, (63, 5, 200, 0, 1) * 14, **_FEW_HEADS)
    yield tokens((1, 1), (200, 40), heads=1, **_POW2)
    yield from (tokens((3, 2), (200, 40), dtype=dtype, **_FEW_HEADS) for dtype in ("fp16", "fp32"))
    yield from (tokens((3, 2), (200, 40), dtype=dtype, **_FEW_HEADS, **_POW2) for dtype in ("fp16", "fp32"))
    yield from (tokens((3, 2), (200, 40), layout=layout, **_FEW_HEADS) for layout in Layout)
    yield tokens((3, 2), (200, 40), fused=True, heads=32, **_POW2)
    yield tokens((3, 2), (200, 40), fused=True, layout=Layout.ODD, **_FEW_HEADS)
    yield tokens((3, 2), (200, 40), pad=3, **_FEW_HEADS)
    yield tokens((3, 2), (200, 40), pad=3, poison="large", fused=True, **_FEW_HEADS)
    yield tokens((257,), (0,), **_FEW_HEADS)


def rotations() -> Iterator[Fields]:
    """Either pairs in either place, in some or nearly all columns, at position 0 and far away, also seen bare."""
    for pairs in ("halves", "neighbours"):
        for rope_last in (False, True):
            turned = {"pairs": pairs, "rope_last": rope_last, **_FEW_HEADS}
            yield tokens((1, 3), (63, 0), **turned)
            yield tokens((2, 1), (5, 4000), **turned, **_UNTURNED)
            yield tokens((2, 1), (5, 40), dims="96-32-128-128", **turned, **_POW2, **_UNTURNED)
    yield tokens((2, 1), (5, 40), dims="2-126-128-128", **_FEW_HEADS)
    yield tokens((2, 1), (5, 40), dims="2-62-64-64", pairs="neighbours", **_FEW_HEADS)
    yield tokens((2,), (70000,), **_FEW_HEADS, **_UNTURNED)


def norms() -> Iterator[Fields]:
    """Keys far from 0, keys whose variance is no more than what the norm adds to it, and keys that are 0."""
    for data in ("shifted", "tiny_values", "zeros"):
        for eps in (1, 10):
            yield tokens((3, 2), (200, 40), data=data, eps=eps, **_FEW_HEADS)
        yield tokens((3, 2), (200, 40), data=data, **_FEW_HEADS, **_UNTURNED, **_UNFOLDED)


def transforms() -> Iterator[Fields]:
    """With and without, of every width that has one, and of columns that it spreads."""
    for hadamard in (True, False):
        yield tokens((2, 1), (63, 5), hadamard=hadamard)
        yield tokens((2, 1), (63, 5), hadamard=hadamard, data="outliers", **_FEW_HEADS)
        yield tokens((2, 1), (63, 5), hadamard=hadamard, data="outliers", rope_last=True, pairs="neighbours", **_POW2)
        yield tokens((2, 1), (63, 5), hadamard=hadamard, dims="32-32-64-64", **_FEW_HEADS)
        yield tokens((2, 1), (63, 5), hadamard=hadamard, data="outliers", **_WIDE)
    yield tokens((2, 1), (63, 5), dims="8-8-16-16", **_FEW_HEADS)


def scales() -> Iterator[Fields]:
    """Scales of either class, folded into weights or not, of one block or two."""
    for kind in ("float32", "pow2"):
        for fold in (True, False):
            yield from each(
                [tokens((3, 1), (63, 5), data=data) for data in VALUES], scales=kind, fold=fold, **_FEW_HEADS
            )
            yield tokens((3, 1), (63, 5), scales=kind, fold=fold, scale=50, data="outliers", heads=32, **_UNTURNED)
        yield tokens((3, 1), (63, 5), scales=kind, **_WIDE)
        yield tokens((3, 1), (63, 5), scales=kind, data="outliers", **{**_WIDE, "dims": "320-64-384-384"}, **_UNTURNED)


def repeated() -> Iterator[Fields]:
    """Batches that are called again, changed, cut or reordered."""
    yield tokens((2, 1, 3, 1), (100, 3, 40, 70), **_FEW_HEADS)
    yield tokens((1, 1, 1, 1), (100, 3, 40, 70), heads=32, pairs="neighbours", rope_last=True, **_POW2)


def fenced() -> Iterator[Fields]:
    """Three and four requests, folded weights and scales beside them, operands of one projection."""
    yield tokens((3, 1, 2), (0, 5, 130), **_FEW_HEADS)
    yield tokens((1, 1, 1, 3), (63, 5, 200, 7), **_FEW_HEADS, **_POW2, **_UNFOLDED)
    yield tokens((3, 2, 1), (200, 40, 0), fused=True, heads=5)


def many_rows() -> Iterator[Fields]:
    """As many tokens as a prefill has."""
    yield tokens((8192,), (0,))
    yield tokens((8192, 3), (60000, 100000), fused=True, pairs="neighbours", **_POW2)
