"""The cases that decide each capability of cache operations, the most telling first; see ``prefill_caselists``.

Most have entries of DeepSeek's models in pages of 64, several requests, and a context before what is asked for.
"""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.roles.cache.case import INDEX_CACHES

_PLANAR, _FLAT, _SHUFFLED = INDEX_CACHES
_DIMS = "128-0-128-128"
_SHORT = {"dims": "16-8-16-32"}


def latents(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """New tokens that are written behind those that a request has."""
    return {"call": Call.WRITE_LATENT, "q": q, "kv": kv, **fields}


def keys(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The same of an indexer's keys."""
    return {"call": Call.WRITE_INDEX, "dims": _DIMS, "cache": _PLANAR, "q": q, "kv": kv, **fields}


def gather(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """Entries behind the first tokens of each request."""
    return {"call": Call.GATHER_LATENT, "q": q, "kv": kv, **fields}


def gather_keys(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The same of an indexer's keys."""
    return {"call": Call.GATHER_INDEX, "dims": _DIMS, "cache": _PLANAR, "q": q, "kv": kv, **fields}


def mapping(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The slots of new tokens."""
    return {"call": Call.SLOT_MAPPING, "q": q, "kv": kv, **fields}


def listed(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """The slots of positions in lists."""
    return {"call": Call.GLOBAL_SLOTS, "q": q, "kv": kv, **fields}


def _room(layout: str) -> Fields:
    form = TILED_FORMATS.get(layout)
    return {"cache": layout} if form is None or (512, 64) in form.dims else {"cache": layout, "dims": "128-0-128-512"}


_TILED = tuple(name for name in TILED_FORMATS if name not in INDEX_CACHES)
_UNEVEN = (5, 1, 70), (60, 0, 63)


def latent_writes() -> Iterator[Fields]:
    """Every layout; pages, padding, layers, memory layouts, ranks, dtypes, both kinds of slots."""
    yield latents(*_UNEVEN, pad=3)
    yield latents(*_UNEVEN, cache="fp8_ds_mla", layers=2)
    yield latents(*_UNEVEN, cache="fp8", kscale=15625, layout=Layout.SLICED)
    yield from (latents(*_UNEVEN, layers=2, pad=2, **_room(name)) for name in _TILED)
    yield latents(*_UNEVEN, cache="fp8_ds_mla", scales="pow2")
    yield from (latents((3, 20), (15, 0), page=page, pad=1, **_SHORT) for page in (1, 2, 16, 48, 256))
    yield from (latents((3, 20), (15, 0), page=page, **_room("fp8_v4")) for page in (1, 2, 48))
    yield latents((9,), (0,), slots="int32", layers=3, cache="fp8", kscale=777)
    yield latents((7, 9), (3, 64), layout=Layout.ODD, cache="fp8_ds_mla")
    yield latents((7, 9), (3, 64), layout=Layout.ODD, **_SHORT)
    yield latents((40, 1, 1), (10, 100, 63), ranks=2, page=16, **_SHORT)
    yield latents((40, 5), (10, 100), ranks=3, interleave=16, page=16, cache="fp8_ds_mla")
    yield latents((9, 3), (5, 70), spare=70_000, page=1, **_SHORT)
    yield latents((0, 4, 0), (9, 3, 0), pad=2, poison="inf")
    yield latents((5, 3), (60, 2), dtype="fp16", cache="fp8_ds_mla")
    yield latents((5, 3), (60, 2), dtype="fp32", **_SHORT)
    yield latents((5, 3), (60, 2), poison="large", pad=2, cache="fp8_ds_mla", dims="128-0-128-512")
    yield latents((1,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10, **_SHORT)


def written_values() -> Iterator[Fields]:
    """Tiles of zeros and small ones, saturation, outliers, of every layout with scales."""
    for kind in ("zero_tiles", "outliers", "large"):
        yield from (latents((20, 3), (0, 60), latents=kind, **_room(name)) for name in _TILED)
    yield from (
        latents((20, 3), (0, 60), latents="tiny_tiles", cache="fp8_ds_mla", scales=scales)
        for scales in ("float32", "pow2")
    )
    yield latents((20, 3), (0, 60), latents="large", cache="fp8", kscale=2_300_000)
    yield latents((20, 3), (0, 60), latents="tiny_values", cache="fp8", kscale=70)
    yield from (
        keys((20, 3), (0, 60), latents=kind, scales=scales)
        for kind in ("zero_tiles", "outliers", "large", "tiny_values")
        for scales in ("float32", "pow2")
    )


def index_writes() -> Iterator[Fields]:
    """Three layouts; pages, padding, layers, both kinds of scales and slots, ranks."""
    yield keys(*_UNEVEN, pad=3)
    yield keys(*_UNEVEN, cache=_SHUFFLED, layers=2)
    yield keys(*_UNEVEN, cache=_FLAT, layers=2, pad=1)
    yield keys(*_UNEVEN, scales="pow2")
    yield from (keys((3, 20), (15, 0), page=page, layers=2) for page in (1, 2, 16, 48, 256))
    yield from (keys((3, 20), (15, 0), page=page, cache=_SHUFFLED) for page in (16, 48, 256))
    yield from (keys((3, 20), (15, 0), page=page, cache=_FLAT) for page in (1, 48))
    yield keys((7, 9), (3, 64), layout=Layout.ODD, slots="int32")
    yield keys((40, 5), (10, 100), ranks=2, interleave=4, page=16)
    yield keys((9, 3), (5, 70), spare=2_000)
    yield keys((0, 4, 0), (9, 3, 0), pad=2, poison="inf")
    yield keys((5, 3), (60, 2), dtype="fp16", scales="pow2")
    yield keys((5, 3), (60, 2), dtype="fp32")
    yield keys((1,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10)


def latent_gathers() -> Iterator[Fields]:
    """Every layout as it is and dequantised; starts inside of pages, requests without entries, compressed ones."""
    yield gather((70, 1, 64), (0, 63, 5), pad=2)
    yield gather((70, 1, 64), (0, 63, 5), cache="fp8_ds_mla", dequantise=True, layers=2)
    yield gather((70, 0, 64), (0, 63, 5), cache="fp8", kscale=15625, dequantise=True)
    yield from (gather((70, 9), (3, 64), dequantise=True, **_room(name)) for name in _TILED)
    yield from (gather((70, 9), (3, 64), layers=2, **_room(name)) for name in _TILED)
    yield from (gather((33, 5), (7, 0), page=page, tails="huge", **_SHORT) for page in (1, 2, 16, 48, 256))
    yield from (gather((33, 5), (7, 0), page=page, dequantise=True, **_room("fp8_v4")) for page in (1, 2, 48))
    yield from (gather((70, 9, 3), (130, 0, 259), ratio=ratio, **_room("fp8_v41")) for ratio in (2, 4, 128))
    yield gather((70, 9), (3, 64), cache="fp8_ds_mla", scales="pow2", dequantise=True, tails="minus")
    yield gather((0, 5, 0), (9, 3, 0), tails="minus", pad=1)
    yield gather((5, 3), (60, 2), dtype="fp16", cache="fp8", dequantise=True, kscale=2_300_000)
    yield gather((5, 3), (60, 2), dtype="fp16", cache="fp8_ds_mla", dequantise=True)
    yield gather((5, 3), (60, 2), dtype="fp32", cache="fp8", dequantise=True)
    yield gather((5, 3), (60, 2), cache="fp8_ds_mla", dims="128-0-128-512", dequantise=True)
    yield gather((300,), (700,), spare=2_000, **_SHORT)
    yield gather((3,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10, **_SHORT)


def index_gathers() -> Iterator[Fields]:
    """Codes and scales of three layouts: page sizes, layers, starts inside of pages, requests without entries."""
    yield gather_keys((70, 1, 64), (0, 63, 5), pad=2)
    yield gather_keys((70, 1, 64), (0, 63, 5), page=1, layers=2)
    yield gather_keys((70, 0, 64), (0, 63, 5), cache=_SHUFFLED, layers=3)
    yield gather_keys((70, 0, 64), (0, 63, 5), cache=_FLAT, layers=2)
    yield from (gather_keys((33, 5), (7, 0), page=page, layers=2, tails="huge") for page in (2, 16, 48, 256))
    yield from (gather_keys((33, 5), (7, 0), page=page, cache=_SHUFFLED) for page in (16, 48, 256))
    yield from (gather_keys((33, 5), (7, 0), page=page, cache=_FLAT) for page in (1, 2, 48))
    yield from (gather_keys((70, 9, 3), (130, 0, 259), ratio=ratio) for ratio in (2, 4, 128))
    yield gather_keys((70, 9), (3, 64), scales="pow2", tails="minus")
    yield gather_keys((0, 5, 0), (9, 3, 0), tails="minus", pad=1, latents="zero_tiles")
    yield gather_keys((300,), (700,), spare=2_000)
    yield gather_keys((3,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10)


def slot_mappings() -> Iterator[Fields]:
    """Pages, ranks, compressed entries, padding, slots beyond 2^31, both dtypes, tokens without an entry."""
    yield mapping((5, 1, 70), (60, 0, 63), pad=3)
    yield mapping((5, 1, 70), (60, 0, 63), ratio=4)
    yield mapping((40, 5, 9), (10, 100, 0), ranks=2, page=16)
    yield from (mapping((40, 5, 9), (10, 100, 0), page=page, tails="minus") for page in (1, 2, 16, 48, 256))
    yield from (mapping((300, 5, 129), (0, 250, 127), ratio=ratio, page=2) for ratio in (2, 4, 128))
    yield mapping((40, 5, 9), (10, 100, 0), ranks=3, interleave=16)
    yield mapping((40, 5, 9), (10, 100, 0), ranks=4, interleave=4, page=16, ratio=2)
    yield mapping((40, 5, 9), (10, 100, 0), spare=2**26, tails="huge")
    yield mapping((40, 5, 9), (10, 100, 0), slots="int32", pad=2)
    yield mapping((0, 5, 0, 3), (9, 3, 0, 0), pad=1)
    yield mapping((1,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10)


def global_slots() -> Iterator[Fields]:
    """Lists of positions: -1 among them, ends of pages, padding, numbers beyond the table, long lists."""
    yield listed((3, 1, 2), (200, 63, 0), pad=2)
    yield listed((3, 1, 2), (200, 63, 0), topk=64, outside=True)
    yield from (listed((3, 1, 2), (200, 63, 0), page=page, tails="minus") for page in (1, 2, 16, 48, 256))
    yield from (listed((3, 1), (500, 63), topk=topk) for topk in (1, 63, 65, 200, 512, 2048))
    yield listed((3, 1, 2), (200, 63, 0), spare=2**24, tails="huge", outside=True)
    yield listed((0, 2, 0), (9, 130, 70))
    yield listed((1,) * 70, (63, 5, 200, 64, 0, 7, 30) * 10)


def fenced() -> Iterator[Fields]:
    """Every call over three and four requests, over packed pages and over pages of several layers."""
    yield latents(*_UNEVEN, cache="fp8_ds_mla", layers=2)
    yield latents((3, 20, 1, 5), (15, 0, 63, 7), page=16, pad=1, **_SHORT)
    yield from (keys(*_UNEVEN, cache=name) for name in INDEX_CACHES)
    yield gather((70, 1, 64), (0, 63, 5), cache="fp8_ds_mla", dequantise=True)
    yield gather((33, 5, 0, 7), (7, 0, 9, 64), page=16, **_SHORT)
    yield from (gather_keys((70, 9, 3), (130, 0, 259), cache=name) for name in INDEX_CACHES)
    yield mapping((5, 1, 70), (60, 0, 63), pad=3)
    yield mapping((5, 1, 7, 9), (60, 0, 63, 5), ratio=4)
    yield listed((3, 1, 2), (200, 63, 0), topk=63)


def refused() -> Iterator[Fields]:
    """What a class may lack: calls, layouts, scales, pages, dtypes of slots, ranks."""
    yield from each(
        [
            *(latents((5, 3), (60, 2), **_room(name)) for name in ("auto", "fp8", *_TILED)),
            latents((5, 3), (60, 2), slots="int32"),
            *(
                keys((5, 3), (60, 2), cache=name, scales=scales)
                for name in INDEX_CACHES
                for scales in ("float32", "pow2")
            ),
            gather((5, 3), (60, 2), cache="fp8", dequantise=True),
            gather_keys((5, 3), (60, 2), ratio=4),
            mapping((5, 3), (60, 2), ranks=2, page=16),
            listed((5, 3), (60, 2), outside=True),
        ]
    )
