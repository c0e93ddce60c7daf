"""What varies in the cases of an indexer. No torch."""

from mla_conformance.backends.roles import IndexSpace, Role
from mla_conformance.cases import batches, dimensions
from mla_conformance.cases.case import Call
from mla_conformance.cases.classes import Draw, first
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import NOTHING, Only, Row, Rule, Space, plain, values
from mla_conformance.roles.indexer.case import CODES, PLAIN, IndexerCase

_PAGED = Only("keys in", ("pages",), "gathered keys lie in no pages")
_SELECTS = Only("call", (Call.INDEX_TOPK,), "scores are of no list")


def _fields(row: Row, draw: Draw) -> Fields:
    if row["columns"] == NOTHING:
        shape, columns = first(batches.shapes_of(row, draw)), {}
    else:
        shape, topk = first(dimensions.shapes_with_columns(row, draw))
        columns = {"topk": topk}
    return {**batches.batch_fields(row, shape, draw), **columns, **dimensions.spare_blocks(row, shape.page, draw)}


INDEXER = Space(
    role=Role.INDEXER,
    capability="indexer_combinations",
    dimensions=(
        values("call", "call", *IndexerCase.calls),
        plain("keys in", {"pages": {"gathered": False}, "rows": {"gathered": True}}),
        values("cache", "cache", CODES, PLAIN),
        values("dims", "dims", "128-0-128-128", "64-0-64-64"),
        values("dtype", "dtype", "bf16", "fp16", "fp32"),
        *batches.batch("64", *batches.DECODE_QUERIES, "17 to 4,096"),
        *batches.pages(_PAGED),
        *dimensions.list_dimensions(_SELECTS),
        values("space", "space", IndexSpace.POSITION, IndexSpace.SLOT, only=_SELECTS),
        dimensions.data("needle", "normal"),
        dimensions.LAYOUT,
        dimensions.SCALE,
        *dimensions.storage(_PAGED),
        dimensions.PADDING,
        dimensions.POISONS,
        dimensions.MAXIMA,
    ),
    rules=(
        Rule("an entry has no room for such keys", ("cache", "dims", "dtype"), dimensions.room),
        batches.LONE_PADDING,
        *batches.BATCH_RULES,
        *batches.PAGE_RULES,
        *dimensions.LIST_RULES,
        dimensions.SCORES_RULE,
    ),
    shape=_fields,
    small=batches.SMALL_BATCHES,
    grids=(("queries", "cache"), ("columns",)),
)
