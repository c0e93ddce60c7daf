"""The cases that decide each capability of an indexer, the most telling first; see ``prefill_caselists`` for the form.

Most have the 64 heads and pages of 64 tokens of the models, keys in codes, and a token that all heads agree on at an
edge of each row.
"""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each
from mla_conformance.roles.indexer.case import PLAIN

_PLAIN = {"cache": PLAIN}
_GATHERED = {"gathered": True}
_FEW_HEADS = {"heads": 4}
_LONG = 2**17 + 62
_BEYOND_64 = (63, 5, 200) * 23


def scores(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The scores of query tokens for the tokens before them and their own."""
    return {"call": Call.INDEX_LOGITS, "data": "needle", "q": q, "kv": kv, **fields}


def best(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The tokens with the best scores."""
    return {"call": Call.INDEX_TOPK, "data": "needle", "q": q, "kv": kv, **fields}


def logits() -> Iterator[Fields]:
    """Heads, lengths at edges, pages, padding, memory layouts, regimes, many requests."""
    yield from each(
        [
            scores((1, 1, 1), (63, 5, 200)),
            scores((1, 1, 1), (63, 5, 130), heads=32),
            scores((1,) * 6, (0, 62, 64, 127, 128, 255), data="normal"),
            scores((2, 2), (130, 63)),
            scores((3, 1, 2), (64, 5, 130)),
            scores((70, 20), (0, 60), **_GATHERED),
            scores((20, 1, 9), (50, 0, 3), heads=32, **_GATHERED),
            scores((1, 1), (200, 40), **_PLAIN),
            scores((2, 5), (70, 40), **_PLAIN, **_GATHERED),
            *(scores((1, 1), (200, 40), page=page, **_FEW_HEADS) for page in (1, 16, 128)),
            scores((1, 1), (200, 40), layers=2, spare=40),
            scores((1, 1), (200, 40), pad=3, tails="minus"),
            scores((1, 1), (200, 40), tails="huge", inflate=3),
            scores((1, 1), (200, 40), layout=Layout.HEADS_FIRST),
            scores((1, 1), (200, 40), dims="64-0-64-64", **_PLAIN),
            scores((1, 1), (200, 40), dtype="fp16", **_PLAIN),
            scores((1, 1), (200, 40), dtype="fp32", **_PLAIN, **_FEW_HEADS),
            scores((1,), (1500,), data="large_logits", **_FEW_HEADS),
            scores((1,) * 70, (*_BEYOND_64, 130)),
        ]
    )


def selections() -> Iterator[Fields]:
    """Margins, ties, fewer tokens than are asked for, numbers that are no multiple of a tile, many rows, a long one."""
    yield from each(
        [
            best((1, 1, 1), (63, 5, 200)),
            best((1, 1), (150, 300), topk=128, data="normal"),
            *(best((1, 1), (300, 130), topk=topk, **_FEW_HEADS) for topk in (1, 2, 63, 65, 100, 200)),
            best((1,) * 6, (0, 62, 63, 64, 127, 128), data="normal"),
            best((1,), (2500,), topk=2048, data="normal", **_FEW_HEADS),
            best((1, 1), (1023, 600), topk=512, data="normal", heads=32),
            best((2, 3), (300, 63)),
            best((1, 1), (300, 63), data="hot_ones"),
            best((1, 1), (300, 63), data="zero_keys"),
            best((1, 1), (300, 63), data="low_rank"),
            best((1, 1, 1), (1000, 300, 63), data="integers", topk=256),
            best((1, 1), (300, 63), pad=2, tails="huge", inflate=3),
            best((1, 1), (300, 63), **_PLAIN),
            best((90, 20), (0, 60), **_GATHERED),
            best((1,) * 70, (*_BEYOND_64, 130)),
            best((1,), (_LONG,), topk=2048, dims="64-0-64-64", **_PLAIN, **_FEW_HEADS),
        ]
    )


def bounds() -> Iterator[Fields]:
    """Rows whose own token is the last that they see: as many as are asked for, one more or one fewer."""
    yield from each(
        [
            best((8, 3), (57, 100)),
            best((70, 5), (0, 60), **_GATHERED),
            best((4, 4), (0, 61), **_PLAIN),
            best((130,), (0,), topk=128, **_FEW_HEADS),
            best((1, 1, 1), (62, 63, 64), **_FEW_HEADS),
            scores((8, 3), (57, 100)),
        ]
    )


def codes() -> Iterator[Fields]:
    """Keys whose scales differ from token to token, and queries whose scales do from head to head."""
    reported: list[Fields] = [
        {"q": (1, 2), "kv": (300, 40), "data": "outliers"},
        {"q": (1, 1), "kv": (300, 40), "data": "rising"},
        {"q": (40, 9), "kv": (30, 0), "data": "outliers", **_GATHERED},
        {"q": (1, 1), "kv": (300, 40), "data": "tiny_values"},
        {"q": (1, 1), "kv": (300, 40), "data": "normal", "page": 16, **_FEW_HEADS},
    ]
    yield from (scores(**fields) for fields in reported)
    yield from (best(**fields) for fields in reported)


def mappings() -> Iterator[Fields]:
    """Slots of a cache whose pages stand in any order, and rows of gathered keys."""
    yield from each(
        [
            best((1, 1, 1), (63, 5, 200)),
            best((2, 3), (300, 63), spare=40),
            *(best((1, 1), (200, 40), page=page, **_FEW_HEADS) for page in (1, 16, 128)),
            best((1, 1), (200, 40), layers=2),
            best((1, 1), (200, 40), pad=2, tails="minus"),
            best((30, 8), (0, 90), **_GATHERED),
            best((1, 1), (200, 40), **_PLAIN),
        ],
        space="slot",
    )


def repeated() -> Iterator[Fields]:
    """Batches that are called again, changed, cut or reordered."""
    yield best((2, 1, 3, 1), (100, 3, 40, 70), space="slot", **_FEW_HEADS)
    yield scores((1, 1, 1, 1), (100, 3, 40, 70), heads=32)


def determinism() -> Iterator[Fields]:
    """Those, and ties that several blocks of a long row could break in any order."""
    yield from repeated()
    yield best((1, 1), (3000, 300), topk=512, data="zero_keys", **_FEW_HEADS)


def fenced() -> Iterator[Fields]:
    """Three and four requests, scored and selected, paged and gathered."""
    yield best((2, 1, 3, 1), (100, 3, 40, 70), space="slot", **_FEW_HEADS)
    yield scores((1, 1, 1), (63, 5, 127), **_FEW_HEADS)
    yield scores((20, 1, 9), (50, 0, 3), heads=32, **_GATHERED)
    yield best((2, 1, 3), (100, 3, 40), **_FEW_HEADS, **_GATHERED)
    yield scores((2, 1, 1), (200, 40, 5), **_PLAIN, **_FEW_HEADS)


def many_rows() -> Iterator[Fields]:
    """Hundreds of requests beside one of 2^17 tokens, and as many rows of one request as a prefill has."""
    yield scores((1,) * 257, (_LONG, *(63, 5, 200, 64) * 64))
    yield best((1,) * 257, (_LONG, *(63, 5, 200, 64) * 64), topk=2048)
    yield scores((4096,), (0,), **_GATHERED)
