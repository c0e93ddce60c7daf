"""The cases that decide each capability of a compressor, the most telling first; see ``prefill_caselists``."""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Layout
from mla_conformance.cases.grammar import Fields, Lengths
from mla_conformance.roles.compress.case import VALUES

_OVER: Fields = {"overlap": True}
_SMALL: Fields = {"dims": "8-8-16-16"}
_POOLS: Fields = {"norm": False, "dims": "128-0-128-128", "inputs": "model"}


def groups(q: Lengths, kv: Lengths = (), **fields: Any) -> Fields:
    """New tokens behind those of an earlier call."""
    return {"call": "compress", "q": q, "kv": kv or (0,) * len(q), **fields}


def whole() -> Iterator[Fields]:
    """One call: each ratio, what scores and states are like, pages, dtypes, memory layouts, padding."""
    yield groups((9, 4, 3), **_OVER)
    yield groups((11, 4, 1, 8), pad=3)
    yield groups((261, 127, 128), ratio=128, state_page=8)
    yield groups((19, 8), dims="448-64-512-512", layers=2, **_OVER)
    yield groups((19, 5, 4), layers=3, **_POOLS)
    yield from (groups((13, ratio, ratio - 1), ratio=ratio, **_OVER, **_SMALL) for ratio in (2, 3))
    yield from (groups((22, 7), data=data, **_OVER) for data in VALUES if data != "normal")
    yield from (groups((22, 7), dtype=dtype, **_OVER) for dtype in ("fp16", "fp32"))
    yield from (groups((30, 9), page=page, layers=2, **_SMALL) for page in (1, 3))
    yield groups((22, 7), layout=Layout.ODD, pad=2, inputs="model", **_OVER)
    yield groups((22, 7), layout=Layout.SLICED, poison="large", pad=1, tails="huge")
    yield groups((9,) * 40, spare=40, page=16, **_SMALL)


def continued() -> Iterator[Fields]:
    """Requests that go on at every residue: token by token, in chunks, beside others that begin or are at an end."""
    yield groups((9, 9, 9, 9), (7, 4, 5, 2), chunk=1, **_OVER)
    yield groups((9, 9, 9, 9), (7, 4, 5, 2), chunk=1)
    yield from (groups((1, 1, 1, 1, 1), (3, 7, 11, 0, 6), tails=tails, **_OVER) for tails in ("null", "minus", "huge"))
    yield groups((1, 2), (127, 126), ratio=128, state_page=8, dims="448-64-512-512")
    yield groups((1, 140), (383, 5), ratio=128, state_page=8, **_SMALL)
    yield groups((5, 0, 12, 1), (3, 9, 0, 7), layers=2, **_OVER)
    yield groups((13, 2, 7), (10, 1, 0), chunk=3, state_page=3, page=2, **_OVER)
    yield groups((4, 9, 2), (2, 3, 21), chunk=2, layers=2, **_POOLS)
    yield from (groups((7, 8, 1), (5, 2, 0), ratio=n, chunk=1, overlap=True, **_SMALL) for n in (2, 3))
    yield groups((12, 3), (6, 40), chunk=5, state_page=1, spare=0, **_OVER)
    yield groups((6, 12, 9), (2, 0, 5), chunk=1, pad=2, poison="large", **_OVER)
    yield groups((8, 20, 3), (1, 6, 8), chunk=4, dtype="fp32", state_page=8, **_OVER)
    yield groups((2, 1, 3), (5, 14, 0), chunk=1, data="peaked", dtype="fp16", **_OVER)


def fenced() -> Iterator[Fields]:
    """Both caches begin and end where memory does."""
    yield groups((9, 3, 1), (6, 0, 3), layers=2, **_OVER)
    yield groups((5, 2, 9), (2, 3, 0), chunk=1, page=2, **_POOLS)
