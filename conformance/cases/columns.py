"""Lists over a batch: their columns, against the keys that there are and against tiles of 64. No torch."""

from collections.abc import Iterator, Sequence

from mla_conformance.cases.batches import (
    LONGEST,
    MIXED,
    MIXED_QUERIES,
    PAGED_SHAPE,
    QUERIES,
    REQUESTS,
    Shape,
    lengths,
    shapes,
    shapes_of,
    tile_class,
    total,
    totals,
)
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, exactly
from mla_conformance.cases.space import ALWAYS, NOTHING, Dimension, Only, Row, Rule, measured

COLUMNS = Numbers(
    {
        **exactly(128, 64, 512, 2048, 1024),
        "other tiles of 64": ((192,), range(256, 2**17, 64)),
        "no tiles of 64": ((100, 63, 65, 33), range(1, 2**17)),
    }
)
_SCANNED = 128
_MOST_NAMED, _MOST_SCORES = 2**20, 2**25
"""Entries of lists, and scores, of a batch in the covering arrays."""
LENGTHS = ("more keys", "fewer keys", "as many")
NAMED = ("whole tiles", "between", "one more", "one fewer")
_OF_64 = {"0": "whole tiles", "1": "one more", "-1": "one fewer"}


def against(longest: int, columns: int) -> str:
    """Whether the longest request has more keys than a list has columns."""
    return "more keys" if longest > columns else "as many" if longest == columns else "fewer keys"


def named(longest: int, columns: int) -> str:
    """What a full list of the longest request leaves of tiles of 64."""
    rest, _, tile = tile_class(min(longest, columns)).partition(" of ")
    return _OF_64[rest] if tile in ("64", "128") else "between"


def column_counts(longest: int, columns: str, length: str, whole: str, *, draw: Draw = PLAIN) -> Sequence[int]:
    """Columns of these classes beside so long a request."""
    tried = (longest,) if length == "as many" else draw.some(COLUMNS, columns, longest)
    wanted = (columns, length, whole)
    return [n for n in tried if (COLUMNS.class_of(n), against(longest, n), named(longest, n)) == wanted]


def _listed(columns: str, length: str, whole: str, *shape: str) -> bool:
    """Whether a shape is beside such columns; gathered keys lie in no pages, and scores are of no list."""
    if columns == NOTHING:
        return True
    found = shapes(*(label for label in shape if label != NOTHING))
    return any(column_counts(each.longest, columns, length, whole) for each in found)


def _columns_exist(longest: str, tile: str, *classes: str) -> bool:
    return any(column_counts(length, *classes) for length in lengths(longest, tile, 1))


def _longer_lists(longest: str, keys: str) -> bool:
    return any(_lists_beside(longest, columns, keys) for columns in COLUMNS)


def _lists_beside(longest: str, columns: str, keys: str) -> bool:
    (whole,) = LONGEST.parts[longest]
    if keys == "as many":
        near = (*whole[:_SCANNED], *COLUMNS.some[columns])
        return any(length in whole and COLUMNS.class_of(length) == columns for length in near)
    ends = (whole[0], whole[-1])
    return any(against(length, n) == keys for length in ends for n in COLUMNS.some[columns])


def _leaves(columns: str, keys: str, whole: str) -> bool:
    return keys != "more keys" or whole in {named(n, n) for n in COLUMNS.some[columns]}


def shapes_with_columns(row: Row, draw: Draw) -> Iterator[tuple[Shape, int]]:
    """Shapes with columns."""
    for shape in shapes_of(row, draw):
        for columns in column_counts(shape.longest, row["columns"], row["keys"], row["named"], draw=draw):
            yield shape, columns


def _few_named(requests: str, queries: str, columns: str) -> bool:
    return _rows(requests, queries) * COLUMNS.first(columns) <= _MOST_NAMED


def _rows(requests: str, queries: str) -> int:
    most = max(map(max, MIXED_QUERIES)) if queries == MIXED else QUERIES.first(queries)
    return REQUESTS.first(requests) * most


def _few_scores(requests: str, queries: str, longest: str) -> bool:
    return _rows(requests, queries) * LONGEST.least(longest) <= _MOST_SCORES


SCORES_RULE = Rule(f"more than {_MOST_SCORES:,} scores", ("requests", "queries", "longest"), _few_scores)
"""Of an indexer, whose rows score every token."""
LIST_RULES = (
    Rule(f"more than {_MOST_NAMED:,} entries of lists", ("requests", "queries", "columns"), _few_named),
    Rule("no list is so long", ("longest", "keys"), _longer_lists),
    Rule("no list is so long, or so short", ("longest", "columns", "keys"), _lists_beside),
    Rule("no list of such columns leaves so much of a tile", ("columns", "keys", "named"), _leaves),
    Rule("no columns are so many", ("longest", "tile", "columns", "keys", "named"), _columns_exist),
    Rule("no columns are so many", ("columns", "keys", "named", *PAGED_SHAPE), _listed, always=True),
)


def list_dimensions(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    """Columns, the keys that there are, and those that a full list names."""
    return (
        measured("columns", COLUMNS, lambda case: COLUMNS.class_of(case.topk), only),
        measured(
            "keys",
            LENGTHS,
            lambda case: against(max(totals(case)), case.topk),
            only,
            lambda case, request: against(total(case, request), case.topk),
        ),
        measured(
            "named",
            NAMED,
            lambda case: named(max(totals(case)), case.topk),
            only,
            lambda case, request: named(total(case, request), case.topk),
        ),
    )
