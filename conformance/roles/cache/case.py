"""Cases of cache operations: entries written to slots, gathered from pages, and slots computed from positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CacheOperation
from mla_conformance.cases.case import Call, Kind, Sizes, at_least, given, one_of
from mla_conformance.cases.grammar import Data
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.roles.layer.case import LATENTS

INDEX_CACHES = tuple(name for name, form in TILED_FORMATS.items() if form.cache == "index")
LATENT_CACHES = ("auto", "fp8", *(name for name in TILED_FORMATS if name not in INDEX_CACHES))
SLOT_DTYPES = ("int64", "int32")
WRITES, GATHERS = (Call.WRITE_LATENT, Call.WRITE_INDEX), (Call.GATHER_LATENT, Call.GATHER_INDEX)
SMALL_DIFFER = tuple(name for name, form in TILED_FORMATS.items() if form.scales != "float32" or form.cache == "index")
"""Layouts whose writers differ in the scales of small tiles."""
COMPUTES = (Call.SLOT_MAPPING, Call.GLOBAL_SLOTS)
SMALL_LATENTS = (Data.TINY_VALUES, "tiny_tiles")
_OF_INDEX = (Call.WRITE_INDEX, Call.GATHER_INDEX)
_COMPRESSED = (*GATHERS, Call.SLOT_MAPPING)
_USUAL_PAGE, _SHUFFLED_PAGE = 64, 16


@dataclass(frozen=True, kw_only=True)
class CacheCase(CacheOperation):
    """A question about a paged cache; q are the tokens that are written, gathered or mapped, kv those before them."""

    role: ClassVar[Role] = Role.CACHE
    calls: ClassVar[tuple[Call, ...]] = (*WRITES, *GATHERS, *COMPUTES)

    cache: str = one_of((*LATENT_CACHES, *INDEX_CACHES), "auto", "layout of the entries")
    latents: str = one_of(LATENTS, Data.NORMAL, "what they are like")
    slots: str = one_of(SLOT_DTYPES, "int64", "dtype of a slot mapping", Kind.DTYPE)
    dequantise: bool = given(False, "whether latents are gathered as values of the model's dtype")
    ratio: int = at_least(1, 1, "tokens that an entry stands for; a gather's q counts entries", Kind.SIZE)
    topk: int = at_least(1, 16, "columns of a list of positions")
    outside: bool = given(False, "whether lists name positions that the block table has no column for")

    @property
    def sizes(self) -> Sizes:
        width = sum(self.latent_dims)
        row = self.topk if self.call == Call.GLOBAL_SLOTS else width
        return super().sizes._replace(row=row, output=row, key=1 if self.call in COMPUTES else width)

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond plain entries in pages of 64, one by one, on one rank."""
        return (
            f"page_{self.page}" if self.page != _USUAL_PAGE else "",
            self.cache if self.call not in COMPUTES and self.cache != "auto" else "",
            self.scales if self.scales != "float32" else "",
            "dcp" if self.ranks > 1 else "",
            "dequantise" if self.dequantise else "",
            "compressed" if self.ratio > 1 else "",
            "outside" if self.outside else "",
            self.slots if self.slots != SLOT_DTYPES[0] else "",
        )

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
        if self.ratio > 1 and self.call not in _COMPRESSED:
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
