"""The cases that decide each decode capability, the most telling first; see ``prefill_caselists`` for the form.

Pages hold 64 tokens unless the page size is what is asked about, since some kernels read no other. Lengths sit at and
next to page and split sizes, and most data hold a dominant key at such an edge.
"""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each

_SMALL = {"dims": "small", "heads": 2}
_BEFORE_EDGES = (0, 14, 15, 16, 30, 31, 62, 63, 64, 126, 127, 128, 254, 255, 256, 511)
"""Context of one token less than pages, tiles and splits, so that the new token stands at their edge."""


def decode(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """Query tokens against what the cache holds: ``kv`` tokens of context and the query's own."""
    return {"call": Call.DECODE, "page": 64, "q": q, "kv": kv, **fields}


def single(*kv: int, **fields: Any) -> Fields:
    """One query token a request."""
    return decode((1,) * len(kv), kv, **fields)


def outputs() -> Iterator[Fields]:
    """One query token a request, output only."""
    yield from each(
        [
            single(64, 5, 1000, 17, data="needle"),
            single(3999, 0, data="hot_tail"),
            single(*_BEFORE_EDGES, data="needle"),
            single(64, 5, 1000, 17),
            single(0, 0, 63),
            single(130, 40, heads=128),
            single(130, 40, heads=16, data="needle"),
            single(200, heads=1, data="needle"),
            single(200, 9, heads=20),
            single(200, 9, dims="64-64-128-256", data="needle"),
            single(200, 9, dims="glm", heads=8),
            single(300, 9, **_SMALL, data="needle"),
            single(9000, **_SMALL, data="hot_tail"),
            single(*(9,) * 8, 1100, **_SMALL),
            single(*(17,) * 60, *(63,) * 50, *(64,) * 40, dims="small", heads=1, data="needle"),
            single(300, 40, dtype="fp16", data="needle"),
            single(300, 40, dtype="fp32", data="needle"),
            single(300, 40, data="large_logits"),
            single(300, 40, data="extreme_logits"),
            single(300, 40, data="negative"),
            single(300, 40, data="rising"),
            single(300, 40, data="outliers"),
            single(300, 40, data="low_rank"),
            single(300, 40, data="tiny_values"),
            single(1000, 129, data="hot_ones"),
            single(300, 40, scale=50),
            single(300, 40, scale=400),
            *(single(300, 40, 7, layout=layout) for layout in Layout if layout != Layout.KV_B_PROJ),
        ],
        lse=False,
    )


def lses() -> Iterator[Fields]:
    """The LSE of a decode, by value."""
    yield single(64, 9, 1000, 17)
    yield single(*range(3, 15), heads=12, data="needle")
    yield single(0, 300, data="large_logits")
    yield single(3000, 3, data="hot_tail")
    yield single(300, 40, scale=50)
    yield single(300, 40, scale=400)
    yield single(300, 40, data="negative")
    yield decode((3, 3), (300, 63), data="needle")
    yield single(300, 40, dims="64-64-128-256")
    yield single(300, 40, **_SMALL)
    for dtype in ("fp16", "fp32"):
        yield single(300, 40, dtype=dtype)
    yield single(900, 2000, 64, heads=64, data="needle")
    yield single(*(17, 40) * 70, heads=32, dims="small")
    yield decode((16,) * 40, (3,) * 40, heads=112, dims="4-4-4-4")
    yield single(300, **_SMALL, dtype="fp16", data="zero_keys")


def several_tokens() -> Iterator[Fields]:
    """Two to eight query tokens a request, as many for each or not."""
    yield decode((3, 1, 2), (64, 5, 1000), data="needle")
    yield decode((4,) * 4, (0, 63, 255, 256), data="needle")
    yield decode((8, 2, 5), (1000, 0, 129))
    yield decode((2,) * 3, (62, 63, 64), data="needle")
    yield decode((1, 2, 3, 4, 5, 6, 7, 8), (17, 0, 61, 62, 250, 7, 1, 500), data="needle")
    yield decode((8, 8), (0, 3))
    yield decode((7,), (300,), data="rising")
    yield decode((2, 2), (2000, 5), data="hot_tail")
    yield decode((5, 5), (254, 509), heads=16, data="needle")
    yield decode((3, 1, 2), (300, 40, 0), **_SMALL, data="needle")
    yield decode((4, 4), (300, 40), dims="64-64-128-256", data="needle")
    yield decode((4, 4), (300, 40), layout=Layout.SLICED)
    for dtype in ("fp16", "fp32"):
        yield decode((3, 1, 2), (300, 40, 0), dtype=dtype, data="needle")
    for page in (16, 32, 128):
        yield decode((4,) * 4, (0, 63, 255, 600), page=page, data="needle")
    yield decode((3, 1, 2), (300, 40, 0), page=1, data="needle")
    # Just past a tile, so that the rows before see nothing of the last one: a maximum that it raises shows below 0.
    yield decode((2,) * 3, (31, 63, 127), **_SMALL, data="negative")
    for lse in (True, False):
        yield decode((4, 4), (61, 125), heads=8, data="negative", lse=lse)
    yield decode((1, 4, 2), (64, 5, 130), heads=2, pad=2, data="needle")


def pages() -> Iterator[Fields]:
    """Page sizes, strides, high block ids, and whatever may stand where no request's token is."""
    yield single(127, 128, 62, 333, tails="minus", layers=2, data="needle")
    yield single(31, 32, 14, 333, page=16, tails="huge", poison="inf", data="needle")
    yield single(70, 1, 0, 9, page=1, spare=40000, **_SMALL, poison="large", data="needle")
    yield single(1, 2, 0, 333, page=1, tails="huge", data="needle")
    yield single(63, 64, 30, 333, page=32, tails="null", data="needle")
    yield single(255, 256, 126, 333, page=128, tails="huge", poison="inf", data="needle")
    yield single(130, 9, layers=3, data="needle")
    yield single(130, 9, page=16, layers=2, tails="minus", poison="inf")
    yield single(4200, 5, page=64, heads=2, data="needle", tails="huge")
    yield single(130, 9, pad=3, tails="minus")
    yield single(130, 9, spare=200, poison="large")
    yield decode((2, 2), (62, 127), tails="huge", poison="inf", data="needle")
    yield single(130, 9, dtype="fp16", tails="huge", poison="large")
    yield single(2100, 5, page=32, **_SMALL, data="needle")
    yield single(*(17,) * 16, page=1, **_SMALL)
    yield single(300, 70, 1, page=1, spare=140_000, **_SMALL, data="needle")


def fp8() -> Iterator[Fields]:
    """An e4m3 cache: scales that are no power of two, saturated and subnormal codes; a scale beside a plain cache."""
    yield from each(
        [
            single(64, 5, 1000, 17, data="needle"),
            single(300, 40, kscale=777),
            single(300, 40, kscale=30_000_000),
            single(300, 40, kscale=1_000_000, data="large_logits"),
            single(2000, 5, data="hot_tail"),
            decode((3, 1, 2), (64, 5, 300), data="needle"),
            decode((4, 4), (64, 300), kscale=23_000),
            single(130, 9, layers=2, tails="huge", data="needle"),
            single(130, 9, page=16, tails="minus", pad=1),
            single(300, 40, data="outliers", kscale=130_000),
            single(300, 40, data="tiny_values"),
            single(1000, 9, data="hot_ones"),
            single(300, 40, heads=128, scale=50),
            single(300, 40, dims="64-64-128-256"),
            single(300, 40, **_SMALL),
            single(300, 40, dtype="fp16", data="needle"),
            *(single(300, 127, 40, page=page, data="needle") for page in (128, 32, 1)),
            decode((4, 4, 4), (64, 300, 130), page=32, data="needle"),
            single(1500, 300, heads=64, data="needle"),
        ],
        cache="fp8",
    )
    yield single(300, 40, kscale=2_300_000)
    yield decode((2, 2), (300, 40), kscale=70)
    yield decode((5, 5), (64, 300), **_SMALL, cache="fp8")
    yield decode((9, 9), (40, 64), **_SMALL, cache="fp8", data="needle")


def fp8_ds_mla() -> Iterator[Fields]:
    """The entry of 656 bytes: a scale for each tile, rope as it is."""
    yield from each(
        [
            single(64, 5, 1000, 17, data="needle"),
            single(300, 40, data="outliers"),
            single(300, 40, data="tiny_values"),
            single(300, 40, kscale=2_300_000),
            decode((3, 1, 2), (64, 5, 300), data="needle"),
            decode((4, 4), (64, 300)),
            single(2000, 5, data="hot_tail"),
            single(130, 9, data="zero_keys"),
            single(300, 40, data="large_logits"),
            single(130, 9, layers=2, tails="huge", data="needle"),
            single(130, 9, page=16, tails="minus", pad=1),
            single(300, 40, heads=128, scale=50),
            single(300, 40, dtype="fp16", data="needle"),
            single(300, 40, dims="128-0-128-512", data="needle"),
            single(64, 5, 1000, 17, data="needle", scales="pow2"),
            single(300, 40, data="outliers", scales="pow2"),
            single(300, 40, data="tiny_values", scales="pow2"),
            decode((3, 1, 2), (64, 5, 300), heads=16, scales="pow2"),
            single(2000, 5, data="hot_tail", heads=128, scales="pow2"),
            single(1500, 300, heads=64, data="needle"),
            decode((4, 4), (300, 130), page=128, data="needle"),
        ],
        cache="fp8_ds_mla",
    )
    yield single(64, 140, heads=1, cache="fp8_ds_mla")


def dcp() -> Iterator[Fields]:
    """Ranks that hold a part of the tokens, or none; each rank's state and all of them merged."""
    yield single(64, 5, 1000, 0, ranks=2, data="needle")
    yield decode((4, 4), (300, 62), ranks=2, interleave=64, data="needle")
    yield single(0, 1, 2, 200, ranks=4, interleave=16)
    yield single(300, 40, 129, ranks=3, interleave=64, data="needle")
    yield single(0, 1, 2, 200, ranks=4)
    yield single(300, 40, 63, 0, ranks=2, interleave=4096)
    yield single(300, 127, ranks=4, interleave=16, data="hot_tail")
    yield decode((4, 4), (300, 5), ranks=2, data="needle")
    yield decode((4, 2, 8), (64, 0, 250), ranks=3, data="needle")
    yield decode((8, 8), (60, 124), ranks=2, interleave=64, data="needle")
    yield decode((4, 2), (0, 1), ranks=4)
    yield single(300, 5, ranks=2, cache="fp8", data="needle")
    yield decode((3, 3), (300, 5), ranks=3, cache="fp8", interleave=16)
    yield single(300, 5, ranks=2, cache="fp8_ds_mla", interleave=64, data="needle")
    yield single(300, 5, ranks=2, pad=2, tails="minus")
    yield single(300, 5, ranks=3, **_SMALL, page=16, data="needle")
    yield single(300, 40, ranks=2, data="large_logits")
    yield single(300, 40, ranks=2, dtype="fp16")
    yield single(300, 40, ranks=2, dtype="fp32")
    yield decode((4, 4), (300, 62), ranks=2, cache="fp8_ds_mla", interleave=64, data="needle")
    yield decode((3, 1, 2), (64, 5, 300), ranks=4, cache="fp8_ds_mla")
    yield decode((4, 4), (900, 62), heads=16, ranks=8, data="needle")
    yield decode((4, 4), (300, 62), **_SMALL, ranks=16, data="needle")


def call_order() -> Iterator[Fields]:
    """Shapes whose second call must not remember the first."""
    yield single(130, 40, heads=2)
    yield decode((2, 2), (130, 40), heads=2, cache="fp8")
    yield single(130, 40, heads=2, cache="fp8", kscale=1_000_000)


def determinism() -> Iterator[Fields]:
    """Lengths that a kernel splits in more than one way."""
    yield single(1500, 40, heads=2, data="hot_tail")
    yield decode((3, 3), (500, 9), heads=2)


def no_side_effects() -> Iterator[Fields]:
    """Poison in everything that no request owns."""
    yield single(64, 33, poison="inf", layers=2)
    yield single(64, 33, cache="fp8", pad=2, layout=Layout.SLICED)


def batches() -> Iterator[Fields]:
    """A long request among short ones, and many alike."""
    yield single(300, 0, 40, 129, data="needle")
    yield single(*(17,) * 8)
    yield decode((2,) * 4, (300, 0, 40, 129), heads=2)


def neighbours() -> Iterator[Fields]:
    """Sequences that end within a page, in plain caches and in codes, on one rank and on two."""
    yield single(64, 5, 300, 17, heads=2, data="needle")
    yield decode((2,) * 3, (62, 300, 9), heads=2)
    yield single(64, 5, 130, heads=2, cache="fp8")
    yield single(64, 5, 130, heads=2, ranks=2)


def fenced() -> Iterator[Fields]:
    """Three and four requests, as for a prefill; every layout of the cache, rows of padding, ranks."""
    yield single(64, 5, 300, 17, heads=2)
    yield decode((2,) * 3, (62, 300, 9), heads=2)
    yield single(63, 5, 128, 17, heads=2, cache="fp8", page=64)
    yield single(63, 5, 130, heads=2, cache="fp8_ds_mla")
    yield single(127, 5, 130, heads=2, page=128, tails="huge")
    yield single(64, 5, heads=2, pad=2, tails="minus")
    yield single(64, 5, 130, heads=2, ranks=2)
    yield decode((3, 1, 2), (64, 5, 130), heads=2, page=1)


def loose_maxima() -> Iterator[Fields]:
    """Maxima in the metadata a hundred times the true ones."""
    yield single(64, 5, 333, inflate=100)
    yield decode((2, 2), (64, 333), inflate=100)


def refusals() -> Iterator[Fields]:
    """Configurations that some backend does not declare."""
    yield from each(
        [
            single(40, dtype="fp64"),
            single(40, dtype="e4m3"),
            single(40, dtype="fp16"),
            single(40, dtype="fp32"),
            single(40, dims="24-8-24-16"),
            single(40, page=48),
            single(40, cache="fp8"),
            single(40, cache="fp8_ds_mla"),
            decode((9, 9), (40, 5)),
            decode((3, 1), (40, 5)),
            decode((2, 2), (40, 5), ranks=2),
        ],
        heads=2,
    )
