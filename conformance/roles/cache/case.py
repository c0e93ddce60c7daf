"""Cases of cache operations, entries written and gathered and slots computed, and what varies in them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, cached, dimensions, grammar
from mla_conformance.cases.case import Call, Sizes, at_least, given, one_of
from mla_conformance.cases.classes import Draw, Numbers, first
from mla_conformance.cases.space import Only, Row, Rule, Space, counted, exactly, measured, never, plain, rule, values
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS
from mla_conformance.roles.layer.case import LATENTS

INDEX_CACHES = tuple(name for name, form in TILED_FORMATS.items() if form.cache == "index")
LATENT_CACHES = ("auto", "fp8", *(name for name in TILED_FORMATS if name not in INDEX_CACHES))
SLOT_DTYPES = ("int64", "int32")
WRITES, GATHERS = (Call.WRITE_LATENT, Call.WRITE_INDEX), (Call.GATHER_LATENT, Call.GATHER_INDEX)
SMALL_DIFFER = tuple(name for name, form in TILED_FORMATS.items() if form.scales != "float32" or form.cache == "index")
"""Layouts whose writers differ in the scales of small tiles."""
COMPUTES = (Call.SLOT_MAPPING, Call.GLOBAL_SLOTS)
SMALL_LATENTS = (grammar.Data.TINY_VALUES, "tiny_tiles")
_OF_INDEX = (Call.WRITE_INDEX, Call.GATHER_INDEX)
_COMPRESSED = Only("call", (*GATHERS, Call.SLOT_MAPPING), "the others count entries, whatever these stand for")
_SHUFFLED_PAGE = 16


@dataclass(frozen=True, kw_only=True)
class CacheCase(cached.CacheOperation):
    """A question about a paged cache; q are the tokens that are written, gathered or mapped, kv those before them."""

    role: ClassVar[Role] = Role.CACHE
    calls: ClassVar[tuple[Call, ...]] = (*WRITES, *GATHERS, *COMPUTES)

    cache: str = one_of((*LATENT_CACHES, *INDEX_CACHES), "auto", "layout of the entries")
    latents: str = one_of(LATENTS, grammar.Data.NORMAL, "what they are like")
    slots: str = one_of(SLOT_DTYPES, "int64", "dtype of a slot mapping")
    dequantise: bool = given(False, "whether latents are gathered as values of the model's dtype")
    ratio: int = at_least(1, 1, "tokens that an entry stands for; a gather's q counts entries")
    topk: int = at_least(1, 16, "columns of a list of positions")
    outside: bool = given(False, "whether lists name positions that the block table has no column for")

    @property
    def sizes(self) -> Sizes:
        width = sum(self.latent_dims)
        row = {Call.GLOBAL_SLOTS: self.topk, Call.SLOT_MAPPING: 1}.get(Call(self.call), width)
        return super().sizes._replace(row=row, output=row, key=1 if self.call in COMPUTES else width)

    @property
    def asks(self) -> tuple[str, ...]:
        entries = {} if self.call in COMPUTES else {"cache": "{}"}
        named = {"page": "page_{}", **entries, "scales": "{}", "ranks": "dcp", "dequantise": "dequantise"}
        return tuple(self.named({**named, "ratio": "compressed", "outside": "outside", "slots": "{}"}))

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        layouts = INDEX_CACHES if self.call in _OF_INDEX else LATENT_CACHES
        if self.cache not in layouts:
            yield f"field cache: {self.call} expects one of {', '.join(layouts)}, got {self.cache!r}"
        small = ("tiny_tiles",) if self.cache in INDEX_CACHES else SMALL_LATENTS
        if self.cache in SMALL_DIFFER and self.latents in small:
            yield (f"field latents: writers of {self.cache} differ in the scales of {self.latents}; expected others")
        if self.dequantise and self.call != Call.GATHER_LATENT:
            yield f"field dequantise: only gather_latent does so, got call {self.call}"
        if self.ratio > 1 and self.call not in _COMPRESSED.classes:
            yield f"field ratio: expected 1 of {self.call}, which counts entries, got {self.ratio}"
        if self.ranks > 1 and self.call not in (*WRITES, Call.SLOT_MAPPING):
            yield f"field ranks: expected 1 of {self.call}, got {self.ranks}"
        if self.page % self.interleave:
            yield f"field interleave: expected a divisor of page {self.page}, got {self.interleave}"
        form = TILED_FORMATS.get(self.cache)
        if form is not None and form.shuffled and self.page % _SHUFFLED_PAGE:
            yield f"field page: {self.cache} expects a multiple of {_SHUFFLED_PAGE}, got {self.page}"
        blocks = self.spare + sum(-(-total // self.page) for total in self.totals) + 1
        narrow = self.slots == "int32" or self.call == Call.GLOBAL_SLOTS
        if self.call in COMPUTES and (blocks + 1) * self.page > 2**31 and narrow:
            yield f"field slots: {blocks} blocks of {self.page} have slots beyond int32; expected int64"


_LATENT = Only("call", (Call.WRITE_LATENT, Call.GATHER_LATENT), "latents are written and gathered by calls of theirs")
_INDEX = Only("call", _OF_INDEX, "index keys are written and gathered by calls of theirs")
_ENTRIES = Only("call", (*WRITES, *GATHERS), "slots are computed of no entries")
_MAPPED = Only(
    "call", (*WRITES, Call.SLOT_MAPPING), "only a slot mapping is of either dtype, and of one of several ranks"
)
_LISTS = Only("call", (Call.GLOBAL_SLOTS,), "there is no list")
_GATHERED = Only("call", (Call.GATHER_LATENT,), "only latents are dequantised while they are gathered")
_FP8 = Only("cache", ("fp8",), "only an fp8 cache has k_scale")
_TILES = tuple(name for name in LATENT_CACHES if name in TILED_FORMATS and TILED_FORMATS[name].scales == "float32")
_SCALED = Only("cache", _TILES, "only float32 scales are of either kind")
_NO_SMALL = tuple(name for name in LATENT_CACHES if name in SMALL_DIFFER)
_RATIOS = Numbers({**exactly(1, 4, 128, 2), "other": ((3,), range(5, 128))})
_LENGTHS = Numbers(
    {
        label: batches.LONGEST.parts[label]
        for label in ("65 to 256", "1 to 16", "17 to 64", "257 to 1,024", "> 2^10", "> 2^15", "> 2^16")
    }
)
_RUNS = ("1", "page", "part of a page")
_SHARES = ("all", "one", "half", "none")
"""Tokens of the longest request that are asked for; those before them are there already, or are left out."""
_MOST_ENTRIES, _MOST_LISTED = 2**17, 2**18


def _share(case: CacheCase) -> str:
    longest = max(range(len(case.q)), key=case.totals.__getitem__)
    q, kv = case.q[longest], case.kv[longest]
    return {0: "none", 1: "one"}.get(q) or ("half" if kv else "all")


def _asked(share: str, longest: int) -> int:
    return {"all": longest, "one": 1, "half": max(2, longest // 2), "none": 0}[share]


def _few_entries(requests: str, others: str, longest: str) -> bool:
    return others != "equal" or batches.REQUESTS.least(requests) * batches.LONGEST.least(longest) <= _MOST_ENTRIES


def _few_listed(requests: str, share: str, longest: str, columns: str) -> bool:
    rows = batches.REQUESTS.least(requests) + _asked(share, batches.LONGEST.least(longest))
    return rows * dimensions.COLUMNS.first(columns) <= _MOST_LISTED


def _fields(row: Row, draw: Draw) -> grammar.Fields:
    page, longest = first(
        (page, longest)
        for page in draw.some(batches.PAGES, row["page"])
        for longest in batches.lengths(row["longest"], row["tile"], 4, page, row["last page"], draw)
    )
    requests, asked = draw.of(batches.REQUESTS, row["requests"]), _asked(row["share"], longest)
    equal = row["others"] == "equal"
    whole = [longest] * requests if equal else batches.contexts_of(row["others"], requests, longest - 1, draw)
    whole[draw.below(requests, "longest") if draw else requests // 2] = longest
    q = tuple(asked if length == longest else min(length, asked or length) for length in whole)
    kv = tuple(length - new for length, new in zip(whole, q, strict=True))
    run = {"page": page, "part of a page": page // 2}.get(row["interleave"], 1)
    listed = {"topk": draw.of(dimensions.COLUMNS, row["columns"])} if row["columns"] else {}
    return {"q": q, "kv": kv, "page": page, "interleave": run, **listed, **dimensions.spare_blocks(row, page, draw)}


CACHE = Space(
    role=Role.CACHE,
    capability="cache_combinations",
    dimensions=(
        values("call", "call", *CacheCase.calls),
        values("cache", "cache", *LATENT_CACHES, only=_LATENT),
        values("index cache", "cache", *INDEX_CACHES, only=_INDEX),
        dimensions.numbers("k_scale", "kscale", dimensions.K_SCALES, _FP8),
        values("tile scales", "scales", *TILE_SCALES, only=_SCALED),
        values("key scales", "scales", *TILE_SCALES, only=_INDEX),
        plain("gathered", {"as stored": {"dequantise": False}, "dequantised": {"dequantise": True}}, _GATHERED),
        plain("dims", {name: {"dims": name} for name in ("r1", "128-0-128-512", "16-8-16-32")}, _LATENT),
        plain("key dims", {"128": {"dims": "128-0-128-128"}}, _INDEX),
        replace(dimensions.DTYPE, only=_ENTRIES),
        values("latents", "latents", *LATENTS, only=_ENTRIES),
        batches.NUMBER,
        measured("others", ("shorter", "alone", "equal"), lambda case: batches.alike(case.totals)),
        counted("longest", _LENGTHS, lambda case: max(case.totals)),
        batches.TOTALS[1],
        *batches.pages(),
        measured("share", _SHARES, _share),
        dimensions.numbers("ranks", "ranks", Numbers({**exactly(1, 2, 3), "4 to 8": ((4,), range(4, 9))}), _MAPPED),
        measured(
            "interleave",
            _RUNS,
            lambda case: {case.page: "page", 1: "1"}.get(case.interleave, "part of a page"),
            Only("ranks", ("2", "3", "4 to 8"), "one rank has all"),
        ),
        dimensions.numbers("ratio", "ratio", _RATIOS, _COMPRESSED),
        values("slots", "slots", *SLOT_DTYPES, only=_MAPPED),
        counted("columns", dimensions.COLUMNS, lambda case: case.topk, _LISTS),
        plain("outside", {"none": {"outside": False}, "some": {"outside": True}}, _LISTS),
        replace(dimensions.ROW_LAYOUT, only=Only("call", WRITES, "operands that are written have a layout")),
        *dimensions.storage(),
        *dimensions.AROUND,
    ),
    rules=(
        Rule("an entry has no room for such latents", ("cache", "dims", "dtype"), dimensions.room),
        never("no code is there to be dequantised", {"cache": ("auto",), "gathered": ("dequantised",)}),
        never("writers differ in the scales of small tiles", {"cache": _NO_SMALL, "latents": SMALL_LATENTS}),
        never("writers differ in the scales of small keys", {"index cache": INDEX_CACHES, "latents": ("tiny_tiles",)}),
        never(
            "shuffled pages are of whole tiles of 16 tokens",
            {"index cache": ("fp8_index_shuffled",), "page": ("1", "other")},
        ),
        never("pages of one token hold no run of several", {"page": ("1",), "interleave": _RUNS[1:]}),
        never("a run of several is part of a usual page", {"page": ("other",), "interleave": _RUNS[2:]}),
        never("something is asked for", {"share": ("none",), "others": ("alone", "equal")}),
        never("something is asked for", {"share": ("none",), "requests": ("1",)}),
        *(rule for rule in batches.LONE_RULES if "queries" not in rule.over),
        replace(batches.IN_BOTH, holds=lambda longest, tile: bool(batches.lengths(longest, tile, 4))),
        *batches.END_RULES,
        rule(f"more than {_MOST_ENTRIES:,} entries", _few_entries),
        rule(f"more than {_MOST_LISTED:,} numbers in lists", _few_listed),
    ),
    shape=_fields,
    small={
        "dims": ("16-8-16-32",),
        "requests": batches.FEW_REQUESTS,
        "others": ("shorter", "alone"),
        "longest": ("65 to 256", "1 to 16", "17 to 64"),
        "unused": ("few",),
        "columns": ("64", "128", "no tiles of 64"),
    },
)
