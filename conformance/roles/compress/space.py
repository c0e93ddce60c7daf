"""What varies in the cases of a compressor. No torch."""

from collections.abc import Iterator
from itertools import cycle, islice

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches
from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, exactly, first
from mla_conformance.cases.dimensions import PADDING, POISONS, numbers, spare_blocks, storage
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Dimension, Row, Rule, Space, measured, never, plain, values
from mla_conformance.roles.compress.case import VALUES, CompressCase

_RATIOS = Numbers({**exactly(4, 128, 2, 3), "other": ((8,), range(5, 128))})
_RESIDUES = ("0", "1", "all but one", "between")
_BEFORE = ("nothing", *_RESIDUES)
_STATE_PAGES = Numbers({**exactly(4, 8, 1), "other": ((3, 16, 64), range(2, 257))})
_NEW = ("several groups", "one token", "a group at most", "none")
_CHUNKS = ("at once", "one by one", "part of a group", "more")
_GROUPS = (2, 1, 3, 0)
_FEW = 4
_MOST_STATES = 2**22
_MOST_BEFORE, _MOST_OTHER = 2**12, 300
"""Tokens before the new ones of the first request, and of another, where they are drawn."""


def _residue(tokens: int, ratio: int) -> str:
    """What tokens leave of whole groups."""
    rest = tokens % ratio
    return str(rest) if rest < 2 else "all but one" if rest == ratio - 1 else "between"


def _before(case: CompressCase, request: int = 0) -> str:
    return _residue(case.kv[request], case.ratio) if case.kv[request] else "nothing"


def _end(case: CompressCase, request: int = 0) -> str:
    return _residue(case.q[request] + case.kv[request], case.ratio)


def _new_of(case: CompressCase, request: int = 0) -> str:
    return _new(case.q[request], case.ratio)


def _new(q: int, ratio: int) -> str:
    return {0: "none", 1: "one token"}.get(q) or ("a group at most" if q <= ratio else "several groups")


def _chunks(case: CompressCase) -> str:
    if not case.chunk:
        return "at once"
    return "one by one" if case.chunk == 1 else "part of a group" if case.chunk < case.ratio else "more"


def _tokens(ratio: str, before: str, end: str, new: str, draw: Draw = PLAIN) -> Iterator[tuple[int, int]]:
    """New tokens of the first request, and those before them."""
    size = draw.of(_RATIOS, ratio, "ratio")
    groups = (*(draw.near(1, _MOST_BEFORE // size, n) for n in range(2)),) if draw else _GROUPS
    starts = [0] if before == "nothing" else [n * size + rest for n in groups for rest in range(size)]
    for kv in starts:
        if before != "nothing" and (not kv or _residue(kv, size) != before):
            continue
        more = size * draw.near(1, _MOST_BEFORE // size, "new") if draw and new == "several groups" else 0
        for q in range(more, more + 3 * size + 1):
            if _new(q, size) == new and _residue(q + kv, size) == end and q + kv:
                yield q, kv
                break


def _exists(ratio: str, before: str, end: str, new: str) -> bool:
    return next(_tokens(ratio, before, end, new), None) is not None


def _chunk_of(chunks: str, ratio: int, draw: Draw) -> int:
    part = draw.near(2, ratio - 1, "chunk") if draw and ratio > 2 else ratio - 1
    return {"at once": 0, "one by one": 1, "part of a group": part, "more": ratio + draw.near(1, ratio, "more")}[chunks]


def _fields(row: Row, draw: Draw) -> Fields:
    ratio, page = draw.of(_RATIOS, row["ratio"], "ratio"), draw.of(batches.PAGES, row["page"])
    q, kv = first(_tokens(row["ratio"], row["before"], row["end"], row["new"], draw))
    number = draw.of(batches.REQUESTS, row["requests"])
    others = ((1, ratio - 1), (_FEW + 1, 0), (2, 2 * ratio), (0, ratio + 1), (_FEW, ratio - 2))
    further = ((draw.below(3 * ratio, "new", n), draw.near(1, _MOST_OTHER, n)) for n in range(2 if draw else 0))
    rest = islice(cycle((*others, *further)), number - 1)
    new, before = zip((q, kv), *rest, strict=True)
    chunk, spare = _chunk_of(row["chunks"], ratio, draw), spare_blocks(row, page, draw)
    return {"call": Call.COMPRESS, "q": new, "kv": before, "page": page, "chunk": chunk, **spare}


def _dimensions() -> Iterator[Dimension]:
    yield values("dtype", "dtype", "bf16", "fp16", "fp32")
    yield values("inputs", "inputs", "float32", "model")
    yield values("data", "data", *VALUES)
    yield values("dims", "dims", "64-64-128-128", "448-64-512-512", "128-0-128-128", "8-8-16-16")
    yield numbers("ratio", "ratio", _RATIOS)
    yield plain("overlap", {"none": {"overlap": False}, "with the group before": {"overlap": True}})
    yield plain("norm", {"normalised": {"norm": True}, "as they are": {"norm": False}})
    yield batches.NUMBER
    yield measured("before", _BEFORE, _before, of_request=_before)
    yield measured("end", _RESIDUES, _end, of_request=_end)
    yield measured("new", _NEW, _new_of, of_request=_new_of)
    yield measured("chunks", _CHUNKS, _chunks)
    yield measured("page", batches.PAGES, lambda case: batches.PAGES.class_of(case.page))
    yield numbers("state page", "state_page", _STATE_PAGES)
    yield values("layout", "layout", Layout.KV_B_PROJ.value, Layout.SLICED.value, Layout.ODD.value)
    yield from storage(most=15)
    yield PADDING
    yield POISONS


def _few(requests: str, ratio: str) -> bool:
    return batches.REQUESTS.first(requests) * _RATIOS.first(ratio) <= _MOST_STATES // 2**9


COMPRESS = Space(
    role=Role.COMPRESS,
    capability="compress_combinations",
    dimensions=tuple(_dimensions()),
    rules=(
        Rule("no such tokens leave so much of a group", ("ratio", "before", "end", "new"), _exists),
        never("groups of two have no such part", {"ratio": ("2",), "chunks": ("part of a group",)}),
        never("nothing new is in no chunks", {"new": ("none",), "chunks": _CHUNKS[1:], "requests": ("1",)}),
        never(
            "groups of 128 are not gone through token by token",
            {"ratio": ("128",), "chunks": ("one by one",), "new": ("several groups", "a group at most")},
        ),
        Rule(f"more than {_MOST_STATES:,} numbers in states", ("requests", "ratio"), _few),
    ),
    shape=_fields,
    small={
        "dims": ("8-8-16-16",),
        "requests": ("2 to 7", "1", "8 to 63"),
        "ratio": ("4", "2", "3", "other"),
        "unused": ("few",),
    },
)
