"""What varies in the cases of a sparse backend. No torch."""

from mla_conformance.backends.roles import IndexSpace, Role
from mla_conformance.cases import batches, dimensions
from mla_conformance.cases.case import Call
from mla_conformance.cases.classes import Draw, Numbers, first
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Only, Row, Rule, Space, measured, never, plain, values
from mla_conformance.roles.sparse.case import EXTRA_CACHES, MAIN_CACHES, SparseCase

PAGED = Only("call", (Call.SPARSE_DECODE,), "gathered keys are plain, lie in no pages and are on one rank")
_SECOND = Only("extra", EXTRA_CACHES[1:], "there is no second cache")


def _second_columns(case: SparseCase) -> str:
    return "as long" if case.extra_topk == case.topk else "longer" if case.extra_topk > case.topk else "shorter"


def _fields(row: Row, draw: Draw) -> Fields:
    shape, columns = first(dimensions.shapes_with_columns(row, draw))
    shorter = draw.near(1, columns - 1, "shorter") if draw and columns > 1 else max(1, columns // 2)
    second = {"as long": columns, "longer": columns + draw.near(columns, 4 * columns, "longer"), "shorter": shorter}
    listed = {"topk": columns, **({"extra_topk": second[row["second list"]]} if row["second list"] else {})}
    spare = dimensions.spare_blocks(row, shape.page, draw)
    return {**batches.batch_fields(row, shape, draw), **listed, **spare}


_LENGTHS = {"none": {"length": False}} | {
    name: {"length": True, "behind": name} for name in ("minus", "huge", "stale", "zero")
}

SPARSE = Space(
    role=Role.SPARSE,
    capability="sparse_combinations",
    dimensions=(
        values("call", "call", *SparseCase.calls),
        *dimensions.cache(*MAIN_CACHES, only=PAGED),
        values("extra", "extra", *EXTRA_CACHES, only=PAGED),
        measured("second list", ("as long", "longer", "shorter"), _second_columns, _SECOND),
        dimensions.numbers(
            "second page", "extra_page", Numbers({"64": ((64,),), "other": ((2, 16), range(1, 257))}), _SECOND
        ),
        values("dims", "dims", "r1", "128-0-128-512", "small"),
        values("dtype", "dtype", "bf16", "fp16", "fp32"),
        *batches.batch("64", *batches.DECODE_QUERIES, "17 to 4,096"),
        *batches.pages(PAGED),
        *dimensions.list_dimensions(),
        *dimensions.ranks(PAGED),
        values("fill", "fill", "ragged", "full"),
        values("holes", "holes", "end", "front", "scattered"),
        plain("length", _LENGTHS),
        values("order", "order", "drawn", "ascending", "descending"),
        plain("repeats", {"none": {"repeats": False}, "some": {"repeats": True}}),
        values("unselected", "unselected", "drawn", "poison"),
        values("sink", "sink", "none", "drawn", "extreme"),
        values("space", "space", *IndexSpace),
        dimensions.LSE,
        dimensions.data("needle", "normal"),
        dimensions.LAYOUT,
        dimensions.SCALE,
        *dimensions.storage(PAGED),
        dimensions.PADDING,
        dimensions.POISONS,
        dimensions.MAXIMA,
    ),
    rules=(
        Rule("the cache's entries have no room for such keys", ("cache", "dims", "dtype"), dimensions.room),
        Rule("the second cache's entries have no room for such keys", ("extra", "dims", "dtype"), dimensions.room),
        batches.LONE_PADDING,
        never("ranks share no sinks", {"ranks": dimensions.SEVERAL_RANKS, "sink": ("drawn", "extreme")}),
        never("ranks share no second cache", {"ranks": dimensions.SEVERAL_RANKS, "extra": EXTRA_CACHES[1:]}),
        never("ranks are merged by their LSE", {"ranks": dimensions.SEVERAL_RANKS, "lse": ("not asked",)}),
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
