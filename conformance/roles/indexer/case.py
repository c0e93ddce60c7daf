"""Cases of an indexer, queries scored against the index keys of their request, and what varies in them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import INDEX_LAYOUTS, IndexSpace, Role
from mla_conformance.cases import batches, cached, classes, dimensions, grammar
from mla_conformance.cases.case import Call, Sizes, at_least, given, one_of
from mla_conformance.cases.space import NOTHING, Only, Row, Rule, Space, plain, values

PLAIN, CODES = INDEX_LAYOUTS  # layouts of an indexer's keys; its queries are in codes, or not, as they are
_USUAL_PAGE, _USUAL_HEADS, _TILE = 64, 64, 64


@dataclass(frozen=True, kw_only=True)
class IndexerCase(cached.CachedCase):
    """A question to an indexer; its head dim is L of ``dims``, and R is 0, since its keys are rotated before."""

    role: ClassVar[Role] = Role.INDEXER
    calls: ClassVar[tuple[Call, ...]] = (Call.INDEX_LOGITS, Call.INDEX_TOPK)

    cache: str = one_of(
        (CODES, PLAIN), CODES, "codes with a scale for each token, under queries in codes; or both in the model's dtype"
    )
    dims: str = "128-0-128-128"
    heads: int = at_least(1, _USUAL_HEADS)
    page: int = at_least(1, _USUAL_PAGE)
    topk: int = at_least(1, 64, "tokens that are selected for each query token")
    space: str = one_of((IndexSpace.POSITION, IndexSpace.SLOT), IndexSpace.POSITION, "what the selected numbers count")
    gathered: bool = given(False, "whether the keys stand gathered, each request's behind one another, not in pages")

    @property
    def head_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def is_paged(self) -> bool:
        return not self.gathered

    @property
    def sizes(self) -> Sizes:  # an output has as many scores as the longest request; heads share a key
        return Sizes(self.head_dim, self.heads * self.head_dim, max(self.totals), self.head_dim)

    @property
    def asks(self) -> tuple[str, ...]:
        several = "uniform" if len(set(self.q)) == 1 else "nonuniform"
        selects = self.call == Call.INDEX_TOPK
        return (
            "gathered" if self.gathered else "",
            f"page_{self.page}" if self.is_paged and self.page != _USUAL_PAGE else "",
            "unquantised" if not self.holds_codes else "",
            several if self.is_paged and max(self.q) > 1 else "",
            f"heads_{self.heads}" if self.heads != _USUAL_HEADS else "",
            "topk" if selects and self.topk % _TILE else "",
            self.space if selects and self.space != IndexSpace.POSITION else "",
        )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.rope_dim or self.ranks > 1:
            yield f"an indexer's cases have dims P-0-V-L and ranks=1, got dims={self.dims} and ranks={self.ranks}"


_PAGED = Only("keys in", ("pages",), "gathered keys lie in no pages")
_SELECTS = Only("call", (Call.INDEX_TOPK,), "scores are of no list")


def _fields(row: Row, draw: classes.Draw) -> grammar.Fields:
    if row["columns"] == NOTHING:
        return dimensions.paged_batch(row["call"], row, draw)
    shape, topk = classes.first(dimensions.shapes_with_columns(row, draw))
    batch = batches.batch_fields(row, shape, draw)
    return {**batch, "topk": topk, **dimensions.spare_blocks(row, shape.page, draw)}


INDEXER = Space(
    role=Role.INDEXER,
    capability="indexer_combinations",
    dimensions=(
        values("call", "call", *IndexerCase.calls),
        plain("keys in", {"pages": {"gathered": False}, "rows": {"gathered": True}}),
        values("cache", "cache", CODES, PLAIN),
        values("dims", "dims", "128-0-128-128", "64-0-64-64"),
        dimensions.DTYPE,
        *batches.batch("64", *batches.DECODE_QUERIES, "17 to 4,096"),
        *batches.pages(_PAGED),
        *dimensions.list_dimensions(_SELECTS),
        values("space", "space", IndexSpace.POSITION, IndexSpace.SLOT, only=_SELECTS),
        *dimensions.INPUTS,
        *dimensions.storage(_PAGED),
        *dimensions.AROUND,
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
