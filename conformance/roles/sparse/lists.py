"""The cases that decide each sparse capability, the most telling first; see ``prefill_caselists`` for the form.

Most have 64 heads and few rows, since some kernels take no fewer heads; pages hold 64 tokens and lists are whole tiles
unless that is what is asked about, of 128 keys where keys are gathered. Most data hold a dominant key at an edge of
each row's list.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each

_SMALL = {"dims": "small", "heads": 2}
_NO_ROPE = {"dims": "128-0-128-512"}
_MODEL_HEADS = (16, 32, 64, 128)


def decode(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """Query tokens against entries of a paged cache."""
    return {"call": Call.SPARSE_DECODE, "heads": 64, "page": 64, "q": q, "kv": kv, **fields}


def single(*kv: int, **fields: Any) -> Fields:
    """One query token a request."""
    return decode((1,) * len(kv), kv, **fields)


def prefill(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """Query tokens against gathered keys; output only, since a kernel may have no LSE."""
    return {"call": Call.SPARSE_PREFILL, "heads": 64, "topk": 128, "q": q, "kv": kv, "lse": False, **fields}


def both(q: Lengths, kv: Lengths, **fields: Any) -> Iterator[Fields]:
    """The same lists over a cache and over gathered keys."""
    yield decode(q, kv, **fields)
    yield prefill(q, kv, **fields)


def needles(cases: Iterable[Fields]) -> Iterator[Fields]:
    """The cases, whose rows have a dominant key unless they say otherwise."""
    return ({"data": "needle", **case} for case in cases)


def decodes() -> Iterator[Fields]:
    """Output only: numbers of heads and of columns, pages, rows, regimes, layouts."""
    yield from each(
        needles(
            [
                single(64, 5, 1000, 17, topk=128),
                single(3000, topk=2048),
                *(single(300, 70, heads=heads) for heads in (16, 32, 128)),
                *(single(300, 9, heads=16, topk=topk) for topk in (1, 2, 63, 65, 100, 127, 129, 192, 200)),
                single(700, 1100, topk=512, heads=128),
                single(1500, topk=1024),
                decode((3, 1, 2), (64, 5, 300), topk=128),
                decode((4,) * 3, (0, 63, 200)),
                *(single(300, 40, page=page, heads=16) for page in (1, 16, 32, 128)),
                single(200, 9, layers=2, heads=16),
                single(200, 9, spare=300),
                single(600, spare=900, topk=512, dims="small", heads=2),
                single(300, 40, **_SMALL, topk=40),
                *(single(300, 40, dtype=dtype, heads=16) for dtype in ("fp16", "fp32")),
                single(*(17, 300) * 20, dims="small", heads=1, topk=32),
                single(300, 40, data="normal"),
                single(300, 40, data="large_logits"),
                single(2000, data="hot_tail", topk=1024, heads=16),
                single(300, 40, data="outliers", heads=16),
                single(300, 40, data="tiny_values", heads=16),
                single(300, 40, data="negative", heads=16),
                single(300, 40, data="ones", heads=16),
                single(300, 40, scale=50, heads=16),
                *(single(300, 7, layout=layout, heads=16) for layout in Layout if layout != Layout.KV_B_PROJ),
                single(300, 40, **_NO_ROPE),
            ]
        ),
        lse=False,
    )


def prefills() -> Iterator[Fields]:
    """The same over gathered keys, with more rows."""
    yield from each(
        needles(
            [
                prefill((5, 9), (0, 300), topk=128),
                prefill((40,), (200,), heads=16, topk=64),
                prefill((2,), (2500,), topk=2048),
                *(prefill((9, 3), (100, 40), heads=heads) for heads in (8, 16, 32, 128)),
                *(prefill((7,), (300,), heads=16, topk=topk) for topk in (1, 63, 65, 100, 129, 200, 512)),
                prefill((3, 2), (700, 600), topk=512),
                prefill((130,), (9,), **_SMALL),
                prefill((65, 64, 63), (40, 0, 7), **_SMALL, topk=40),
                *(prefill((9,), (100,), heads=16, dtype=dtype) for dtype in ("fp16", "fp32")),
                prefill((9,), (100,), spare=40, heads=16, poison="large"),
                prefill((9,), (100,), data="normal"),
                prefill((9,), (100,), data="large_logits", heads=16),
                prefill((5,), (1500,), data="hot_tail", topk=1024, heads=16),
                prefill((9,), (100,), data="outliers", heads=16),
                prefill((9,), (100,), data="negative", heads=16),
                prefill((9,), (100,), data="ones", heads=16),
                prefill((9,), (100,), scale=400, heads=16),
                *(prefill((9,), (60,), layout=layout, heads=16) for layout in Layout if layout != Layout.KV_B_PROJ),
                prefill((9,), (100,), **_NO_ROPE),
            ]
        ),
        lse=False,
    )


def lses() -> Iterator[Fields]:
    """The LSE of both calls, by value."""
    yield from each(_lses(), lse=True)


def _lses() -> Iterator[Fields]:
    yield single(64, 5, 1000, 17, topk=128)
    yield prefill((5, 9), (0, 300), topk=128, data="needle")
    for heads in _MODEL_HEADS:
        yield from both((2, 1), (130, 9), heads=heads)
    yield single(2500, data="hot_tail", topk=2048, heads=16)
    yield from both((2,), (300,), scale=50, heads=16)
    yield from both((2,), (300,), data="large_logits", heads=16)
    yield from both((2,), (300,), data="negative", heads=16)
    yield from both((7,), (64,), fill="ragged", holes="scattered", heads=16)
    yield single(*(40, 9) * 70, dims="small", heads=2, topk=16)
    for dtype in ("fp16", "fp32"):
        yield from both((2,), (100,), dtype=dtype, heads=16)


def padding() -> Iterator[Fields]:
    """-1 at the end, at the front and anywhere; contexts shorter than a list; rows that name no key."""
    rows = (1,) * 8, (300, 5, 64, 0, 1000, 200, 17, 90)
    yield decode(*rows, data="needle", fill="ragged", topk=128)
    yield prefill((7, 9), (0, 200), data="needle", fill="ragged", topk=128)
    for holes in ("front", "scattered"):
        yield from both((3, 4), (300, 64), data="needle", fill="ragged", holes=holes, topk=128)
    yield from both((1, 2), (3, 0), topk=512, heads=16)
    yield from both((2, 1), (300, 9), topk=192, fill="ragged", heads=128)
    yield single(*rows[1], fill="ragged", topk=2048, heads=16)
    yield from both((5,), (200,), fill="ragged", topk=100, holes="scattered", heads=16)
    yield single(300, 64, 5, fill="ragged", cache="fp8_ds_mla", scales="pow2", topk=128)
    yield from both((5, 3), (90, 9), fill="ragged", sink="drawn", heads=16)
    yield from both((5,), (90,), **_SMALL, fill="ragged", topk=16, dtype="fp32")


def lengths() -> Iterator[Fields]:
    """Whatever stands behind a list's length."""
    for behind in ("huge", "stale", "zero", "minus"):
        yield from each(
            both((3, 4), (300, 64), data="needle", fill="ragged", length=True, topk=128), behind=behind, poison="inf"
        )
    yield from both((2, 1), (300, 9), fill="ragged", length=True, behind="huge", topk=192, heads=128)
    yield single(300, 64, 5, 17, fill="ragged", length=True, behind="huge", cache="fp8_ds_mla", scales="pow2", topk=128)
    yield single(1000, 64, 5, 17, fill="ragged", length=True, behind="stale", topk=1024, heads=16, data="needle")
    yield from both((3, 4), (300, 64), fill="ragged", length=True, holes="scattered", behind="huge", heads=16)
    yield from both((5,), (200,), fill="ragged", length=True, behind="huge", topk=100, heads=16)
    yield from both((70,), (9,), **_SMALL, fill="ragged", length=True, behind="stale", topk=40)
    yield single(300, 40, length=True, topk=64)


def orders() -> Iterator[Fields]:
    """Lists in order and not, and keys that are named twice."""
    yield from both((2, 3), (300, 64), data="needle", topk=128)
    yield from both((2, 3), (300, 64), data="needle", topk=128, repeats=True)
    for order in ("ascending", "descending"):
        yield from both((2,), (300,), data="needle", order=order)
    yield single(300, 64, cache="fp8_ds_mla", data="needle")
    yield from both((3,), (200,), fill="ragged", repeats=True, heads=16)
    yield single(300, 64, cache="fp8_ds_mla", repeats=True, data="needle")
    yield single(1500, topk=1024, heads=16, data="hot_tail")


def spaces() -> Iterator[Fields]:
    """What the numbers of a list count."""
    yield decode((1, 3, 2), (300, 5, 64), space="position", data="needle")
    yield prefill((5, 9, 2), (0, 300, 64), space="position", data="needle", heads=16)
    yield decode((1, 3, 2), (300, 5, 64), space="rank_local", data="needle")
    yield single(300, 70, 9, space="position", page=16, data="needle", tails="huge", heads=16)
    yield single(300, 70, 9, space="position", page=1, data="needle", tails="minus", heads=16)
    yield single(300, 70, 9, space="position", fill="ragged", holes="scattered", cache="fp8_ds_mla", data="needle")
    yield prefill((5, 9, 2), (0, 300, 64), space="position", fill="ragged", length=True, behind="huge", heads=16)
    yield single(300, 70, space="position", pad=3, data="needle", layers=2, heads=16)
    yield single(300, 70, spare=500, data="needle")
    yield prefill((1,) * 66, (3,) * 66, space="position", dims="small", heads=2)


def unselected() -> Iterator[Fields]:
    """No number in any entry that no list names, and block 0 with it."""
    for poison in ("nan", "inf", "large"):
        yield from both((2, 1, 1), (300, 9, 70), unselected="poison", poison=poison, fill="ragged", data="needle")
    yield from each(
        [
            single(700, 70, topk=128, cache="fp8_ds_mla", fill="ragged", holes="front"),
            single(700, 70, topk=128, cache="fp8", fill="ragged"),
            single(700, 70, topk=128, fill="ragged", length=True, behind="stale"),
            single(700, 70, topk=128, fill="ragged", length=True, behind="zero"),
            prefill((4,), (300,), fill="ragged", length=True, behind="zero"),
            prefill((4,), (300,), fill="ragged", heads=16, dtype="fp16"),
            single(700, 70, topk=100, heads=16, page=16, layers=2),
            single(700, 70, heads=16, cache="fp8_v4", **_NO_ROPE, fill="ragged"),
        ],
        unselected="poison",
    )


def sinks() -> Iterator[Fields]:
    """A sink's share, none of it, all of it, and rows without keys beside it."""
    yield from both((2, 3), (300, 9), sink="drawn", data="needle")
    yield from both((2, 3), (300, 9), sink="extreme")
    yield from both((2, 3), (300, 9), sink="extreme", fill="ragged", heads=16)
    yield from both((2,), (300,), sink="drawn", data="large_logits", heads=16)
    yield from both((2,), (300,), sink="drawn", lse=False, heads=128)
    yield single(300, 64, sink="drawn", cache="fp8_ds_mla", scales="pow2")
    yield single(300, 64, sink="drawn", cache="fp8_v4", **_NO_ROPE)
    yield single(1500, sink="drawn", topk=1024, heads=16, data="hot_tail")
    yield from both((3,), (40,), sink="drawn", dtype="fp32", **_SMALL)


def second_cache() -> Iterator[Fields]:
    """Two caches of one layout and of two, of other pages and other lists."""
    v4 = {"cache": "fp8_v4", "extra": "fp8_v4", **_NO_ROPE}
    v41 = {"cache": "fp8_v41", "extra": "fp4_v41", **_NO_ROPE}
    yield single(300, 64, 1000, data="needle", topk=128, **v4)
    yield single(300, 64, 1000, data="needle", topk=128, **v41)
    yield single(300, 64, extra="auto", data="needle")
    yield single(700, 64, topk=128, extra_topk=512, extra_page=16, sink="drawn", **v4)
    yield single(700, 64, fill="ragged", length=True, behind="huge", sink="drawn", **v4)
    yield single(700, 64, fill="ragged", holes="scattered", unselected="poison", **v41)
    yield decode((3, 1), (300, 64), extra="fp8_ds_mla", cache="fp8_ds_mla", heads=16)
    yield single(700, 64, extra="auto", extra_topk=100, topk=63, heads=16, dtype="fp16")
    yield single(700, 64, extra="fp8_v41", cache="fp8_v41", heads=128, extra_page=2, **_NO_ROPE)
    yield single(300, 64, extra="auto", **_SMALL, fill="ragged", topk=16)


def _format(cache: str, **fields: Any) -> Iterator[Fields]:
    """What every layout of codes is asked."""
    yield from each(
        [
            single(64, 5, 1000, 17, data="needle", topk=128),
            single(300, 40, data="outliers"),
            single(300, 40, data="tiny_values"),
            single(300, 40, data="normal", heads=128),
            decode((3, 2), (64, 300), data="needle"),
            single(1500, data="hot_tail", topk=1024),
            single(130, 9, data="zero_keys", heads=16),
            single(130, 9, data="large_logits"),
            single(130, 9, layers=2, data="needle", fill="ragged"),
            *(single(130, 70, page=page, data="needle", heads=16) for page in (16, 1, 128)),
            single(300, 40, kscale=2_300_000, heads=16),
        ],
        cache=cache,
        **fields,
    )


def fp8() -> Iterator[Fields]:
    """e4m3 codes under one scale."""
    yield from _format("fp8")
    yield single(300, 40, cache="fp8", **_SMALL, topk=40)


def fp8_ds_mla() -> Iterator[Fields]:
    """The 656 bytes of V3.2."""
    yield from _format("fp8_ds_mla")
    yield from _format("fp8_ds_mla", scales="pow2")
    yield single(300, 40, cache="fp8_ds_mla", data="needle", **_NO_ROPE)
    yield single(300, 40, cache="fp8_ds_mla", dtype="fp16", data="needle")
    yield single(2500, cache="fp8_ds_mla", scales="pow2", topk=2048, data="needle")


def fp8_v4() -> Iterator[Fields]:
    """The 584 bytes of V4, whose scales stand behind the data of a page."""
    yield from _format("fp8_v4", **_NO_ROPE)
    yield single(300, 40, cache="fp8_v4", spare=200, page=2, data="needle", heads=16, **_NO_ROPE)


def fp8_v41() -> Iterator[Fields]:
    """The 528 bytes of V4.1."""
    yield from _format("fp8_v41", **_NO_ROPE)


def fp4_v41() -> Iterator[Fields]:
    """The 288 bytes of V4.1's second cache."""
    yield from each(_format("fp8_v41", **_NO_ROPE), extra="fp4_v41")
    yield single(300, 40, extra="fp4_v41", data="needle", heads=16, **_NO_ROPE)


def dcp() -> Iterator[Fields]:
    """Ranks that hold a part of what is named, or nothing; lists of slots, of positions and of a rank's own tokens."""
    for space in ("slot", "position", "rank_local"):
        yield single(300, 64, 5, ranks=2, space=space, data="needle")
        yield decode((3, 1), (200, 64), ranks=4, interleave=16, space=space, data="needle", heads=16)
    yield single(0, 1, 300, ranks=3, interleave=64, fill="ragged", space="position", heads=16)
    yield single(300, 64, ranks=2, cache="fp8_ds_mla", interleave=64, data="needle")
    yield single(700, 64, ranks=2, fill="ragged", length=True, behind="huge", heads=16, data="needle")
    yield single(700, 64, ranks=2, cache="fp8_v4", interleave=64, heads=16, data="needle", **_NO_ROPE)
    yield single(300, 40, ranks=8, heads=16, topk=100, fill="ragged")


def rows() -> Iterator[Fields]:
    """Rows whose neighbours name nothing."""
    yield decode((3, 2), (300, 64), data="needle", topk=128)
    yield prefill((3, 2), (300, 64), data="needle", topk=128)
    yield from both((4,), (200,), fill="ragged", heads=16, holes="scattered")
    yield single(300, 64, 5, cache="fp8_ds_mla", data="needle")


def call_order() -> Iterator[Fields]:
    """Shapes whose second call must not remember the first."""
    yield from both((1, 1), (130, 40), heads=16)
    yield single(130, 40, heads=16, cache="fp8_ds_mla", fill="ragged", length=True, behind="stale")


def determinism() -> Iterator[Fields]:
    """Lists that a kernel splits."""
    yield single(1500, 40, heads=16, topk=1024, data="hot_tail")
    yield prefill((3,), (500,), heads=16, topk=256)


def no_side_effects() -> Iterator[Fields]:
    """Poison in everything that is not named."""
    yield single(64, 33, poison="inf", layers=2, heads=16, unselected="poison", fill="ragged")
    yield prefill((3, 5), (64, 33), heads=16, unselected="poison", fill="ragged", layout=Layout.SLICED)
    yield single(64, 33, cache="fp8_ds_mla", pad=2, heads=16, sink="drawn")


def batches() -> Iterator[Fields]:
    """A long request among short ones, and many alike."""
    yield single(300, 0, 40, 129, heads=16, data="needle")
    yield prefill((2, 7, 1, 3), (300, 0, 40, 129), heads=16, data="needle")
    yield single(*(17,) * 8, heads=16, cache="fp8_ds_mla")


def neighbours() -> Iterator[Fields]:
    """Requests whose lists name none of another's keys."""
    yield single(64, 5, 300, 17, heads=16, data="needle")
    yield prefill((2, 3, 1), (64, 5, 130), heads=16, data="needle")
    yield single(64, 5, 130, heads=16, cache="fp8_ds_mla", space="position")


def fenced() -> Iterator[Fields]:
    """Three and four requests; lists with lengths, sinks, a second cache, every layout, gathered keys."""
    yield single(64, 5, 300, 17, heads=16, fill="ragged")
    yield prefill((2, 3, 1), (64, 5, 130), heads=16)
    yield single(64, 5, 130, heads=16, cache="fp8_ds_mla", sink="drawn")
    yield prefill((2, 7, 1, 3), (30, 0, 40, 129), heads=16, fill="ragged")
    yield single(64, 5, 130, 3, heads=16, cache="fp8", space="position")
    yield single(130, 64, 5, fill="ragged", length=True, extra="auto", extra_topk=100, **_SMALL)


def loose_maxima() -> Iterator[Fields]:
    """Maxima in the metadata a hundred times the true ones."""
    yield single(64, 5, 333, inflate=100, heads=16)
    yield prefill((2, 3), (64, 333), inflate=100, heads=16)


def refusals() -> Iterator[Fields]:
    """Configurations that some backend does not declare."""
    yield single(40, dtype="fp64")
    yield single(40, dtype="e4m3")
    yield single(40, dtype="fp32")
    yield single(40, heads=20)
    yield single(40, page=48)
    yield single(40, topk=65)
    yield single(40, dims="24-8-24-16")
    yield single(40, cache="fp8")
    yield single(40, cache="fp8_v4", **_NO_ROPE)
    yield single(40, space="position")
    yield single(40, extra="auto")
    for changed in ({"topk": 65}, {"sink": "drawn"}, {"length": True, "fill": "ragged"}, {"repeats": True}):
        yield from both((3,), (40,), **changed)


def model_shapes() -> Iterator[Fields]:
    """All heads of a model over whole lists, and hundreds of rows."""
    yield single(2500, 2100, heads=128, topk=2048, cache="fp8_ds_mla", scales="pow2", data="needle")
    yield prefill((300,), (40,), **_SMALL, topk=128, data="needle")
    yield single(*(17, 63, 64, 130) * 40, dims="small", heads=16, topk=64, data="needle")


def cuda_graph() -> Iterator[Fields]:
    """The largest batch; the test captures a shorter one and replays it with others."""
    context = (2000, 64, 300, 129, 17, 1000, 40, 5)
    yield single(*context, topk=128, data="needle", fill="ragged")
    yield single(*context, topk=128, cache="fp8_ds_mla", scales="pow2", fill="ragged", length=True, behind="stale")
    yield prefill((2,) * 4, context[:4], topk=128, data="needle")


def streams() -> Iterator[Fields]:
    """Lists that a kernel splits, so that it needs memory of its own."""
    yield single(2000, 64, 300, 129, topk=512, data="needle")
    yield single(2000, 64, 300, 129, topk=512, cache="fp8_ds_mla", scales="pow2")
    yield prefill((30, 5), (2000, 64), topk=512)


def large_offsets() -> Iterator[Fields]:
    """Blocks beyond 2^31 elements, and beyond 2^32; the queries of 65,536 tokens before those that are judged."""
    yield single(2000, 700, 64, topk=128, far="cache31", data="needle")
    yield single(2000, 700, 64, topk=128, far="cache31", data="needle", cache="fp8_ds_mla", scales="pow2")
    yield single(2000, 700, 64, topk=128, far="cache32", data="needle")
    for heads, far in ((64, "rows31"), (128, "rows32")):
        yield prefill((40,), (300,), heads=heads, topk=512, far=far, data="needle")


def many_rows() -> Iterator[Fields]:
    """Around 2^16 rows, and one call of a model's size."""
    for tokens in (65535, 65537):
        yield prefill((tokens,), (9,), heads=16, topk=64)
    yield decode((4096,) * 16, (9,) * 16, heads=16, topk=64, dims="small")
    yield prefill((4096,), (4096,), heads=128, topk=2048)
