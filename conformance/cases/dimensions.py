"""Dimensions that the cases of several roles vary in, and what excludes some of their classes. No torch."""

from collections.abc import Iterator, Sequence

from mla_conformance.cases import batches, cached, grammar, space
from mla_conformance.cases.case import POISON, Layout
from mla_conformance.cases.classes import PLAIN, Draw, Labels, Numbers, first
from mla_conformance.cases.space import ALWAYS, NOTHING, Dimension, Only, Row, Rule, by_length, counted, measured
from mla_conformance.reference.entry_formats import TILE_SCALES


def numbers(name: str, field: str, classes: Numbers, only: Only = ALWAYS) -> Dimension:
    labels: dict[str, grammar.Fields] = {label: {} for label in classes.parts}
    return Dimension(name, labels, lambda case: classes.class_of(getattr(case, field)), only, (field, classes))


def cache(*layouts: str, only: Only = ALWAYS) -> tuple[Dimension, ...]:
    fp8 = Only("cache", ("fp8",), "only an fp8 cache is read with k_scale")
    tiles = Only("cache", ("fp8_ds_mla",), "only the tiles of fp8_ds_mla have scales of either kind")
    return (
        space.values("cache", "cache", *layouts, only=only),
        numbers("k_scale", "kscale", K_SCALES, fp8),
        space.values("tile scales", "scales", *TILE_SCALES, only=tiles),
    )


_FEW_SLOTS = 6000
_DOUBLINGS = 6  # of the most slots, so that blocks of 64 have ids beyond 2^15 as well
K_SCALES = Numbers(
    {
        "usual": ((13_000,), range(5_000, 100_000)),
        "small": ((777,), range(1, 5_000)),
        "large": ((2_300_000, 998_700, 1_002_900), range(100_000, 2**31)),
    },
    sizes=False,
)
SCALES = Numbers(
    {"usual": ((159,), range(100, 200)), "small": ((50,), range(1, 100)), "large": ((237,), range(200, 2**31))},
    most=400,
    sizes=False,
)
RANKS = Numbers({**space.exactly(1, 2, 3, 4), "5 to 8": ((8,), range(5, 9)), "9 to 16": ((16,), range(9, 17))})
SEVERAL_RANKS = tuple(label for label in RANKS.parts if label != "1")

DTYPE = space.values("dtype", "dtype", "bf16", "fp16", "fp32")
SCALE = numbers("scale", "scale", SCALES)
LAYOUT = space.values("layout", "layout", *(layout.value for layout in Layout))
# Of whatever attends: every data regime, layout of the operands, and softmax scale.
INPUTS = (space.values("data", "data", *dict.fromkeys(("needle", "normal", *grammar.Data))), LAYOUT, SCALE)
# Of rows that are written, or compressed.
ROW_LAYOUT = space.values("layout", "layout", Layout.KV_B_PROJ.value, Layout.SLICED.value, Layout.ODD.value)
PADDING = numbers("padding", "pad", Numbers({"none": ((0,),), "some": ((3,), range(1, 2**16))}, most=40))
POISONS = space.values("poison", "poison", *POISON)
LSE = space.plain("lse", {"asked": {"lse": True}, "not asked": {"lse": False}})
MAXIMA = numbers("maxima", "inflate", Numbers({"true": ((1,),), "loose": ((100,), range(2, 2**31))}, most=200))
AROUND = (PADDING, POISONS)  # what is around a batch in memory


def storage(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    """What stands behind a block table's rows, layers that share a buffer, and spare slots."""

    def unused(case: cached.CachedCase) -> str:
        return next((f"2^{power} slots" for power in (16, 15) if case.spare * case.page >= 2**power), "few")

    return (
        space.values("tails", "tails", *cached.TAILS, only=only),
        numbers("layers", "layers", Numbers({"1": ((1,),), "several": (range(2, 9),)}), only),
        measured("unused", ("few", "2^15 slots", "2^16 slots"), unused, only),
    )


def ranks(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    shared = Only("ranks", SEVERAL_RANKS, "one rank has all tokens")
    runs = Numbers(space.exactly(1, 16, 64))
    return numbers("ranks", "ranks", RANKS, only), numbers("interleave", "interleave", runs, shared)


def room(layout: str, dims: str, dtype: str) -> bool:
    head, rank = grammar.dimensions_of(dims)
    return cached.has_room(layout, (rank, head.qk_rope_head_dim), dtype)


ROOM = Rule("the cache's entries have no room for such keys", ("cache", "dims", "dtype"), room)
WITH_LSE = space.never("ranks are merged by their LSE", {"ranks": SEVERAL_RANKS, "lse": ("not asked",)})


def spare_blocks(row: Row, page: int, draw: Draw) -> grammar.Fields:
    few = draw.near(1, _FEW_SLOTS, "unused") if draw else 3 * page
    most = 2**16 << draw.below(_DOUBLINGS, "slots")
    slots = {NOTHING: 3 * page, "few": few, "2^15 slots": 2**15, "2^16 slots": most}[row["unused"]]
    return {"spare": -(-slots // page)}


COLUMNS = Numbers(  # lists over a batch: their columns, against the keys that there are and against tiles of 64
    {
        **space.exactly(128, 64, 512, 2048, 1024),
        "other tiles of 64": ((192,), range(256, 2**17, 64)),
        "no tiles of 64": ((100, 63, 65, 33), range(1, 2**17)),
    }
)
_SCANNED = 128
_MOST_NAMED, _MOST_SCORES = 2**20, 2**25  # entries of lists, and scores, of a batch in the covering arrays
_OF_64 = {"0": "whole tiles", "1": "one more", "-1": "one fewer"}


def against(longest: int, columns: int) -> str:
    return "more keys" if longest > columns else "as many" if longest == columns else "fewer keys"


def named(longest: int, columns: int) -> str:
    """What a full list of the longest request leaves of tiles of 64."""
    rest, _, tile = batches.tile_class(min(longest, columns)).partition(" of ")
    return _OF_64[rest] if tile in ("64", "128") else "between"


# Of lengths, each with the columns of a list.
KEYS = Labels(("more keys", "fewer keys", "as many"), lambda of: against(*of))
NAMED = Labels(("whole tiles", "between", "one more", "one fewer"), lambda of: named(*of))


def column_counts(longest: int, columns: str, length: str, whole: str, *, draw: Draw = PLAIN) -> Sequence[int]:
    tried = (longest,) if length == "as many" else draw.some(COLUMNS, columns, longest)
    wanted = (columns, length, whole)
    return [n for n in tried if (COLUMNS.class_of(n), against(longest, n), named(longest, n)) == wanted]


def _listed(columns: str, length: str, whole: str, *shape: str) -> bool:
    if columns == NOTHING:  # scores are of no list, and gathered keys lie in no pages
        return True
    found = batches.shapes(*(label for label in shape if label != NOTHING))
    return any(column_counts(each.longest, columns, length, whole) for each in found)


def _lists_beside(longest: str, columns: str, keys: str) -> bool:
    (whole,) = batches.LONGEST.parts[longest]
    if keys == "as many":
        near = (*whole[:_SCANNED], *COLUMNS.some[columns])
        return any(length in whole and COLUMNS.class_of(length) == columns for length in near)
    return any(against(length, n) == keys for length in (whole[0], whole[-1]) for n in COLUMNS.some[columns])


def shapes_with_columns(row: Row, draw: Draw) -> Iterator[tuple[batches.Shape, int]]:
    for shape in batches.shapes_of(row, draw):
        for columns in column_counts(shape.longest, row["columns"], row["keys"], row["named"], draw=draw):
            yield shape, columns


def paged_batch(call: str, row: Row, draw: Draw) -> grammar.Fields:
    shape = first(batches.shapes_of(row, draw))
    return {"call": call, **batches.batch_fields(row, shape, draw), **spare_blocks(row, shape.page, draw)}


def _rows(requests: str, queries: str) -> int:
    return batches.REQUESTS.first(requests) * batches.most_queries(queries)


SCORES_RULE = space.rule(  # of an indexer, whose rows score every token
    f"more than {_MOST_SCORES:,} scores",
    lambda requests, queries, longest: _rows(requests, queries) * batches.LONGEST.least(longest) <= _MOST_SCORES,
)
LIST_RULES = (
    space.rule(
        f"more than {_MOST_NAMED:,} entries of lists",
        lambda requests, queries, columns: _rows(requests, queries) * COLUMNS.first(columns) <= _MOST_NAMED,
    ),
    space.rule(
        "no list is so long",
        lambda longest, keys: any(_lists_beside(longest, columns, keys) for columns in COLUMNS.parts),
    ),
    space.rule("no list is so long, or so short", _lists_beside),
    Rule(
        "no list of such columns leaves so much of a tile",
        ("columns", "keys", "named"),
        lambda columns, keys, whole: keys != "more keys" or whole in {named(n, n) for n in COLUMNS.some[columns]},
    ),
    Rule(
        "no columns are so many",
        ("longest", "tile", "columns", "keys", "named"),
        lambda longest, tile, *of: any(column_counts(length, *of) for length in batches.lengths(longest, tile, 1)),
    ),
    Rule("no columns are so many", ("columns", "keys", "named", *batches.PAGED_SHAPE), _listed, always=True),
)


def list_dimensions(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    return (
        counted("columns", COLUMNS, lambda case: case.topk, only),
        by_length("keys", KEYS, batches.totals, only, lambda case, total: (total, case.topk)),
        by_length("named", NAMED, batches.totals, only, lambda case, total: (total, case.topk)),
    )


def residues() -> Iterator[Dimension]:
    """What the numbers of a batch leave of tiles, warps and groups of heads, and their magnitudes, for every role.

    No row asks for one; among the members that are drawn for a row those with new pairs of residues are taken.
    """
    fourths = Labels(("0", "1", "2", "3"), lambda number: str(number % 4))

    def groups(size: int) -> Labels:
        near = {0: "0", 1: "1", size - 1: "-1"}
        return Labels(
            (*near.values(), "few", "more"),
            lambda n: near.get(n % size) or ("few" if n % size <= size // 2 else "more"),
        )

    magnitudes = Labels(tuple(map(str, range(32))), lambda number: str(max(0, number - 1).bit_length()))
    yield counted("magnitude of requests", magnitudes, lambda case: len(case.q))
    yield counted("magnitude of rows", magnitudes, lambda case: sum(case.q))
    yield counted("magnitude of the longest", magnitudes, lambda case: max(case.totals))
    yield counted("magnitude of slots", magnitudes, lambda case: getattr(case, "spare", 0) * case.page)
    # Those that the longest request fills or begins.
    yield counted("tiles of 64 mod 4", fourths, lambda case: -(-max(case.totals) // 64))
    yield counted("tiles of 128 mod 4", fourths, lambda case: -(-max(case.totals) // 128))
    yield counted("tiles of 512 mod 4", fourths, lambda case: -(-max(case.totals) // 512))
    yield counted("requests mod 32", groups(32), lambda case: len(case.q))
    yield counted("rows mod 64", groups(64), lambda case: sum(case.q))
    yield counted("heads mod 4", fourths, lambda case: case.heads)
    yield counted("heads mod 16", groups(16), lambda case: case.heads)
