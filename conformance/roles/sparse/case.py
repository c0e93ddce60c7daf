"""Cases of a sparse backend, queries against selected entries, and what varies in them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import IndexSpace, Role
from mla_conformance.cases import batches, classes, dimensions, grammar
from mla_conformance.cases.cached import CACHES, CachedCase
from mla_conformance.cases.case import Call, Sizes, at_least, given, one_of
from mla_conformance.cases.space import Only, Row, Rule, Space, counted, never, plain, values
from mla_conformance.reference.entry_formats import TILED_FORMATS

MAIN_CACHES = tuple(dict.fromkeys((*CACHES, *(name for name, form in TILED_FORMATS.items() if form.cache == "latent"))))
EXTRA_CACHES = ("none", *MAIN_CACHES, *(name for name, form in TILED_FORMATS.items() if form.cache == "extra"))
_EXTRA_RATIO = 4  # tokens that an entry of a second cache stands for, as V4 compresses them
_TILE = 64


@dataclass(frozen=True, kw_only=True)
class SparseCase(CachedCase):
    role: ClassVar[Role] = Role.SPARSE
    calls: ClassVar[tuple[Call, ...]] = (Call.SPARSE_DECODE, Call.SPARSE_PREFILL)
    causal: ClassVar[bool] = False  # the lists alone say what is seen
    layouts: ClassVar[tuple[str, ...]] = ("cache", "extra")

    cache: str = one_of(MAIN_CACHES, "auto", "layout of the cache; gathered keys are plain")
    topk: int = at_least(1, 64, "columns of the lists")
    fill: str = one_of(
        ("full", "ragged"),
        "full",
        "how many keys a list names: as many as there are and fit, or fewer by chance, none among it",
    )
    order: str = one_of(("drawn", "ascending", "descending"), "drawn", "how the keys of a list are ordered")
    holes: str = one_of(
        ("end", "front", "scattered"), "end", "where a list that names fewer keys than it has columns holds -1"
    )
    length: bool = given(False, "whether lengths are handed over beside the lists")
    behind: str = one_of(
        ("minus", "zero", "stale", "huge"),
        "minus",
        "what a list holds from its length on: -1, 0, keys of any request, or what no cache has",
    )
    space: str = one_of(IndexSpace, IndexSpace.SLOT, "what the numbers of a list count")
    repeats: bool = given(False, "whether lists name some keys twice")
    unselected: str = one_of(("drawn", "poison"), "drawn", "whether keys that no list names are as drawn, or poison")
    sink: str = one_of(
        ("none", "drawn", "extreme"),
        "none",
        "the sinks' logits: none handed over, drawn, or infinite ones of either sign among them",
    )
    extra: str = one_of(EXTRA_CACHES, "none", "layout of a second cache; none without one")
    extra_topk: int = at_least(1, 64, "columns of its lists")
    extra_page: int = at_least(1, 64, "tokens of its pages")

    @property
    def is_paged(self) -> bool:
        return self.call == Call.SPARSE_DECODE

    @property
    def has_extra(self) -> bool:
        return self.extra != "none"

    @property
    def extra_lens(self) -> tuple[int, ...]:
        return tuple(-(-total // _EXTRA_RATIO) for total in self.totals)

    @property
    def holds_codes(self) -> bool:
        return super().holds_codes or self.extra not in ("none", "auto")

    @property
    def visible_lens(self) -> tuple[int, ...]:
        main = (min(self.topk, total) for total in self.totals)
        extra = (min(self.extra_topk, length) if self.has_extra else 0 for length in self.extra_lens)
        return tuple(map(sum, zip(main, extra, strict=True)))

    @property
    def sizes(self) -> Sizes:  # heads share a key, whose first columns are its value
        columns, output = 2 * self.kv_lora_rank + self.rope_dim, self.heads * self.kv_lora_rank
        return Sizes(columns, self.heads * columns, output, sum(self.latent_dims))

    @property
    def asks(self) -> tuple[str, ...]:
        return (
            *super().asks,
            f"heads_{self.heads}" if self.heads % _TILE else "",
            "topk" if self.topk % _TILE else "",
            *self.named({"length": "topk_length", "space": "{}", "repeats": "duplicates", "sink": "sink"}),
            *self.named({"extra": "extra_{}", "lse": (False, "lse")}),
        )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.is_paged and (self.cache != "auto" or self.has_extra or self.ranks > 1):
            yield (
                "call sparse_prefill: expected cache=auto, extra=none and ranks=1, since gathered keys are plain, got "
                f"cache={self.cache}, extra={self.extra} and ranks={self.ranks}"
            )
        if self.ranks > 1 and (self.sink != "none" or self.has_extra or not self.lse):
            yield (
                f"field ranks: expected sink=none, extra=none and lse=1 where {self.ranks} ranks share the tokens, got "
                f"sink={self.sink}, extra={self.extra} and lse={int(self.lse)}"
            )
        if self.space == IndexSpace.RANK_LOCAL and not self.is_paged:
            yield "field space: gathered keys are on one rank, expected slot or position, got rank_local"
        if not self.length and self.behind != "minus":
            yield f"field behind: without lengths every entry counts, expected minus, got {self.behind}"


PAGED = Only("call", (Call.SPARSE_DECODE,), "gathered keys are plain, lie in no pages and are on one rank")
_SECOND = Only("extra", EXTRA_CACHES[1:], "there is no second cache")
_SECOND_COLUMNS = classes.Labels(
    ("as long", "longer", "shorter"), lambda n: "longer" if n > 0 else "shorter" if n else "as long"
)


def _fields(row: Row, draw: classes.Draw) -> grammar.Fields:
    shape, columns = classes.first(dimensions.shapes_with_columns(row, draw))
    shorter = draw.near(1, columns - 1, "shorter") if draw and columns > 1 else max(1, columns // 2)
    second = {"as long": columns, "longer": columns + draw.near(columns, 4 * columns, "longer"), "shorter": shorter}
    listed = {"topk": columns, **({"extra_topk": second[row["second list"]]} if row["second list"] else {})}
    return {**batches.batch_fields(row, shape, draw), **listed, **dimensions.spare_blocks(row, shape.page, draw)}


_BEHIND: dict[str, grammar.Fields] = {x: {"length": True, "behind": x} for x in ("minus", "huge", "stale", "zero")}

SPARSE = Space(
    role=Role.SPARSE,
    capability="sparse_combinations",
    dimensions=(
        values("call", "call", *SparseCase.calls),
        *dimensions.cache(*MAIN_CACHES, only=PAGED),
        values("extra", "extra", *EXTRA_CACHES, only=PAGED),
        counted("second list", _SECOND_COLUMNS, lambda case: case.extra_topk - case.topk, _SECOND),
        dimensions.numbers(
            "second page", "extra_page", classes.Numbers({"64": ((64,),), "other": ((2, 16), range(1, 257))}), _SECOND
        ),
        values("dims", "dims", "r1", "128-0-128-512", "small"),
        dimensions.DTYPE,
        *batches.batch("64", *batches.DECODE_QUERIES, "17 to 4,096"),
        *batches.pages(PAGED),
        *dimensions.list_dimensions(),
        *dimensions.ranks(PAGED),
        values("fill", "fill", "ragged", "full"),
        values("holes", "holes", "end", "front", "scattered"),
        plain("length", {"none": {"length": False}, **_BEHIND}),
        values("order", "order", "drawn", "ascending", "descending"),
        plain("repeats", {"none": {"repeats": False}, "some": {"repeats": True}}),
        values("unselected", "unselected", "drawn", "poison"),
        values("sink", "sink", "none", "drawn", "extreme"),
        values("space", "space", *IndexSpace),
        dimensions.LSE,
        *dimensions.INPUTS,
        *dimensions.storage(PAGED),
        *dimensions.AROUND,
        dimensions.MAXIMA,
    ),
    rules=(
        dimensions.ROOM,
        Rule("the second cache's entries have no room for such keys", ("extra", "dims", "dtype"), dimensions.room),
        batches.LONE_PADDING,
        never("ranks share no sinks", {"ranks": dimensions.SEVERAL_RANKS, "sink": ("drawn", "extreme")}),
        never("ranks share no second cache", {"ranks": dimensions.SEVERAL_RANKS, "extra": EXTRA_CACHES[1:]}),
        dimensions.WITH_LSE,
        never("gathered keys are on one rank", {"call": (Call.SPARSE_PREFILL,), "space": (IndexSpace.RANK_LOCAL,)}),
        *batches.BATCH_RULES,
        *batches.PAGE_RULES,
        *dimensions.LIST_RULES,
    ),
    shape=_fields,
    small={
        **batches.SMALL_BATCHES,
        "columns": ("64", "128", "no tiles of 64"),
        "dims": ("small",),
        "ranks": ("1", "2", "3", "4"),
    },
    grids=(("columns",), ("queries",), ("cache",)),
)
