"""What batches over a cache vary in: requests, their query tokens, and lengths by magnitude and by what tiles leave.

Lengths are total ones, new tokens included, since those are what tiles, pages and splits are filled with. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from operator import attrgetter
from typing import NamedTuple

from mla_conformance.cases import space
from mla_conformance.cases.case import Case
from mla_conformance.cases.classes import PLAIN, SOME, Draw, Labels, Numbers
from mla_conformance.cases.grammar import Fields, Lengths
from mla_conformance.cases.space import ALWAYS, Dimension, Only, Row, Rule, by_length, counted, exactly, measured, never

HEADS = Numbers(
    {
        **exactly(16, 128, 1),
        "odd": ((5,), range(3, 128, 2)),
        **exactly(8, 64, 32),
        "whole tiles of 16": ((48, 96), range(16, 128, 16)),
        "half a tile of 16": ((24, 40), range(24, 128, 16)),
        "even": ((20, 2, 4, 12), range(2, 128, 2)),
    }
)
REQUESTS = Numbers(
    {
        "2 to 7": ((4,), range(2, 8)),
        "1": ((1,),),
        "8 to 63": ((12,), range(8, 64)),
        "64 to 299": ((72,), range(64, 300)),
        "300 or more": (range(300, 2**20),),
    },
    most=1100,
)
QUERIES = Numbers({**exactly(1, 2, 3, 4), **space.spans("5 to 8", "9 to 16"), "17 to 4,096": ((40,), range(17, 4097))})
MIXED = "mixed"
DECODE_QUERIES = ("1", "2", MIXED, "3", "4", "5 to 8", "9 to 16")
ROW_QUERIES = ("1", "2", MIXED, "3", "4", "17 to 4,096")  # of rows that do not attend: a few, or many
LONGEST = Numbers(
    {
        **space.spans("65 to 256", "1 to 16", "17 to 64", "257 to 1,024"),
        **{f"> 2^{least}": (range(2**least + 1, 2**most + 1),) for least, most in ((10, 12), (12, 15), (15, 16))},
        "> 2^16": (range(2**16 + 1, 2**20 + 1),),
    }
)
TILES = (128, 64, 16)
MIXED_QUERIES = ((3, 1, 2), (2, 1), (9, 4, 1, 1), (1, 16, 5))
_SHORTER = (17, 5, 1, 64, 33)
_MANY = 8
_RUNS_FROM = 64  # requests whose drawn lengths may come in runs
_LONG_OTHER = 320  # tokens of a drawn one that is not the longest
MOST_TOKENS = 2**19  # of a batch in the covering arrays


@cache
def tile_class(length: int) -> str:
    """What a length leaves of the largest tile that it fills, or fills but for one, or exceeds by one."""
    left = (f"{rest} of {tile}" for tile in TILES for rest in (0, 1, -1) if (length - rest) % tile == 0)
    return next(left, "between")


TILE = Labels(("between", *(f"{rest} of {tile}" for tile in TILES for rest in (0, 1, -1))), tile_class)


def last_of(length: int, page: int) -> str:
    return {page - 1: "all but one", 1: "one token", 0: "full"}.get(length % page, "between")


# Of lengths, each with the tokens of a page.
LAST_PAGE = Labels(("between", "full", "one token", "all but one"), lambda of: last_of(*of))


def query_class(q: Lengths) -> str | None:
    return MIXED if len(set(q)) > 1 else QUERIES.class_of(q[0])


def alike(lengths: Sequence[int]) -> str:
    return "alone" if len(lengths) == 1 else "equal" if len(set(lengths)) == 1 else "shorter"


def others_class(case: Case, lengths: Sequence[int] | None = None) -> str:
    return "no context" if 0 in case.kv and len(case.q) > 1 else alike(lengths or case.totals)


OTHERS = ("shorter", "alone", "equal", "no context")
SEVERAL = tuple(label for label in REQUESTS.parts if label != "1")


def _product_class(product: int) -> str:
    """Query tokens of a request times heads, which kernels tile together, against tiles of 64."""
    if product % 64 == 0:
        return "multiple of 64"
    return "up to 16" if product <= 16 else "17 to 63" if product < 64 else "beyond 64"


PRODUCT = Labels(("17 to 63", "up to 16", "multiple of 64", "beyond 64"), _product_class)
MEASURED_HEADS = counted("heads", HEADS, lambda case: case.heads)
NUMBER = counted("requests", REQUESTS, lambda case: len(case.q))
totals = attrgetter("totals")
# Of every batch: how long its longest request is, and each other one.
TOTALS = (by_length("longest", LONGEST, totals), by_length("tile", TILE, totals))


def batch(usual_heads: str, *queries: str) -> tuple[Dimension, ...]:
    return (
        replace(MEASURED_HEADS, classes={label: {} for label in (usual_heads, *HEADS.parts)}),
        measured("queries", queries, lambda case: query_class(case.q)),
        by_length("rows x heads", PRODUCT, attrgetter("q"), of=lambda case, new: new * case.heads),
        NUMBER,
        measured("others", OTHERS, others_class),
        *TOTALS,
    )


KINDS = ("both", "decodes", "prefills")
KIND = measured(  # what the requests of a layer's batch do
    "requests that",
    KINDS,
    lambda case: "prefills" if not case.decodes else "decodes" if case.decodes == len(case.q) else "both",
)
WITH_DECODES = Only(KIND.name, ("both", "decodes"), "nothing decodes")
WITH_PREFILLS = Only(KIND.name, ("both", "prefills"), "nothing prefills")
PAGES = Numbers({**exactly(64, 16, 32, 128, 256, 1), "other": ((8, 48, 2, 96), range(2, 256))})
_SCANNED = 1024


def pages(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    return (
        counted("page", PAGES, lambda case: case.page, only),
        by_length("last page", LAST_PAGE, totals, only, lambda case, total: (total, case.page)),
    )


@cache
def in_tile(numbers: range, tile: str, page: int = 1, last: str = "full") -> Sequence[int]:
    found = (n for n in numbers[:_SCANNED] if tile_class(n) == tile and last_of(n, page) == last)
    return tuple(islice(found, SOME))


def drawn_in_tile(
    classes: Numbers, label: str, tile: str, least: int = 1, page: int = 1, last: str = "full", draw: Draw = PLAIN
) -> Sequence[int]:
    """The first few lengths of a class that leave so much, from a drawn member on, or else of all from the least on."""
    *_, whole = classes.parts[label]
    numbers = range(max(least, whole[0]), whole[-1] + 1)
    start = max(draw.of(classes, label, "length"), numbers.start) if draw else numbers.start
    return in_tile(range(start, numbers.stop), tile, page, last) or in_tile(numbers, tile, page, last)


lengths = partial(drawn_in_tile, LONGEST)


def rows_and_heads(queries: str, heads: str, product: str, draw: Draw = PLAIN) -> Sequence[tuple[Lengths, int]]:
    if draw:
        tokens: Sequence[Lengths] = query_tokens(queries, draw)
        pairs = ((q, number) for number in draw.some(HEADS, heads) for q in tokens)
        if found := [(q, number) for q, number in pairs if _product_class(max(q) * number) == product]:
            return found
    return _rows_and_heads(queries, heads, product)


def query_tokens(queries: str, draw: Draw) -> Sequence[Lengths]:
    if queries != MIXED:
        return [(number,) for number in draw.some(QUERIES, queries)]
    drawn = (tuple(draw.near(1, 16, "mixed", n, k) for k in range(2 + draw.below(4, n))) for n in range(SOME))
    return [*(q for q in drawn if draw and len(set(q)) > 1), *MIXED_QUERIES]


@cache
def _rows_and_heads(queries: str, heads: str, product: str) -> Sequence[tuple[Lengths, int]]:
    tokens: Sequence[Lengths] = MIXED_QUERIES if queries == MIXED else [(n,) for n in QUERIES.members(queries)]
    pairs = ((q, number) for number in HEADS.members(heads) for q in tokens)
    return tuple(islice(((q, n) for q, n in pairs if _product_class(max(q) * n) == product), SOME))


# Tokens of the longest request beyond its new ones that it has at least beside others of a class.
BEYOND = {"alone": 0, "no context": 1, "equal": 1, "shorter": 2}


class Shape(NamedTuple):
    heads: int
    queries: Lengths
    page: int
    longest: int  # tokens of its longest request


def shapes(*classes: str, draw: Draw = PLAIN) -> Iterator[Shape]:
    """Shapes of the classes that ``PAGED_SHAPE`` names, or ``SHAPE`` where a batch lies in no pages."""
    queries, heads, product, others, longest, tile, page, last = (*classes, "1", "full")[: len(PAGED_SHAPE)]
    for tokens, number in rows_and_heads(queries, heads, product, draw):
        for size in draw.some(PAGES, page):
            for length in lengths(longest, tile, max(tokens) + BEYOND[others], size, last, draw):
                yield Shape(number, tokens, size, length)


SHAPE = ("queries", "heads", "rows x heads", "others", "longest", "tile")
PAGED_SHAPE = (*SHAPE, "page", "last page")


def most_queries(queries: str) -> int:
    return max(map(max, MIXED_QUERIES)) if queries == MIXED else QUERIES.first(queries)


def _long_enough(queries: str, others: str, longest: str, tile: str) -> bool:
    fewest = min(map(max, MIXED_QUERIES)) if queries == MIXED else QUERIES.least(queries)
    return bool(lengths(longest, tile, fewest + BEYOND[others]))


def _ends(longest: str, tile: str, page: str, last_page: str) -> bool:
    return any(lengths(longest, tile, 1, size, last_page) for size in PAGES.some[page])


FEW_REQUESTS = ("2 to 7", "1", "8 to 63")
FEW_HEADS = ("16", "1", "odd", "8", "half a tile of 16", "even")
SMALL_BATCHES = {  # classes of batches that are little work
    "heads": FEW_HEADS,
    "queries": ("1", "2", MIXED, "3", "4"),
    "requests": FEW_REQUESTS,
    "others": ("shorter", "alone", "no context"),
    "longest": ("65 to 256", "1 to 16", "17 to 64"),
    "unused": ("few",),
}
UNMIXED = never("one request has no mixed queries", {"requests": ("1",), "queries": (MIXED,)})
NOT_BOTH = never("one request does not both", {"requests": ("1",), KIND.name: ("both",)})
LONE_RULES: tuple[Rule, ...] = (  # of batches of one request
    never("one request has no others", {"requests": ("1",), "others": ("shorter", "equal", "no context")}),
    never("of several requests none is alone", {"requests": SEVERAL, "others": ("alone",)}),
    UNMIXED,
    never("one request has no mixed queries", {"others": ("alone",), "queries": (MIXED,)}),
)

_NO_ROOM = "no such length has room for the query tokens"
IN_BOTH = space.rule("no length is in both classes", lambda longest, tile: bool(lengths(longest, tile)))
# The narrow ones say why; and without them the widest would be asked in vain very often.
BATCH_RULES: tuple[Rule, ...] = (
    *LONE_RULES,
    Rule("no numbers with such a product", SHAPE[:3], lambda *classes: bool(rows_and_heads(*classes))),
    IN_BOTH,
    space.rule(_NO_ROOM, _long_enough),
    Rule(_NO_ROOM, SHAPE, lambda *classes: any(shapes(*classes))),
    Rule(
        f"more than {MOST_TOKENS:,} tokens",
        ("requests", "others", "longest"),
        lambda n, others, longest: others != "equal" or REQUESTS.least(n) * LONGEST.least(longest) <= MOST_TOKENS,
    ),
)
END_RULES: tuple[Rule, ...] = (
    space.rule(
        "no page of this size is filled so far",
        lambda page, last_page: any(last_page == last_of(n, size) for size in PAGES.some[page] for n in range(size)),
    ),
    space.rule(
        "no length leaves so much of a tile and of a page",
        lambda tile, page, last_page: _ends("257 to 1,024", tile, page, last_page),
    ),
    space.rule("no such length leaves so much of a tile and of a page", _ends),
)
PAGE_RULES = (*END_RULES, Rule(_NO_ROOM, PAGED_SHAPE, lambda *classes: any(shapes(*classes))))
LONE_PADDING = never(
    "rows of padding have one query token each",
    {"queries": tuple(label for label in QUERIES.parts if label != "1"), "padding": ("some",)},
)


def shapes_of(row: Row, draw: Draw) -> Iterator[Shape]:
    return shapes(*(row[name] for name in (PAGED_SHAPE if row.get("page") else SHAPE)), draw=draw)


def batch_fields(row: Row, shape: Shape, draw: Draw) -> Fields:
    requests = draw.of(REQUESTS, row["requests"])
    q = tuple(islice(cycle(shape.queries), requests))
    longest = place_of_longest(q, draw)
    if row["others"] == "equal":
        kv = [shape.longest - new for new in q]
    else:
        most = shape.longest - max(shape.queries) - 1
        kv = contexts_of(row["others"], requests, most, draw)
        kv[longest] = shape.longest - q[longest]
    return {"heads": shape.heads, "q": q, "kv": tuple(kv), **({"page": shape.page} if row.get("page") else {})}


def decodes_of(row: Row, requests: int, draw: Draw) -> int:
    some = 1 + draw.below(requests - 1, "decodes") if draw and requests > 1 else -(-requests // 2)
    return {"decodes": requests, "prefills": 0, "both": some}[row[KIND.name]]


def short(request: int) -> int:
    """Tokens of a request that is not the longest, where none are drawn; the same for most of many."""
    return _SHORTER[request % len(_SHORTER) if request < _MANY else 0]


def place_of_longest(q: Lengths, draw: Draw) -> int:
    """Which of the requests with most new tokens is the longest; the first in the second half if none is drawn."""
    most = max(q)
    places = [number for number, new in enumerate(q) if new == most]
    return draw.pick(places, "longest") if draw else next((n for n in places if n >= len(q) // 2), places[0])


def contexts_of(others: str, requests: int, most: int, draw: Draw) -> list[int]:
    """Contexts of requests of which none is the longest, which is put in the place of any but the last.

    The same for most of many, so that ids stay short. Drawn ones are of a few lengths, in rounds or in runs; some of
    them as long as can be, or of every magnitude below.
    """
    if not draw:
        empty = max(0, requests - 1) if others == "no context" else 0
        given = _SHORTER if requests < _MANY else _SHORTER[:1]
        return [0] * empty + [max(1, min(given[n % len(given)], most)) for n in range(empty, requests)]
    run = draw.pick((1, 1, 1, 33, 40), "run") if requests >= _RUNS_FROM else 1
    if draw.below(2, "magnitudes"):
        step = draw.pick((1, 2), "step")
        highest = [most >> power for power in range(0, max(1, most.bit_length()), step)]
        pool = [max(1, high - draw.below(max(1, high // 2), "below", high)) for high in highest]
        pool = pool[draw.below(len(pool), "from") // 2 :]
    else:
        size = draw.pick((len(_SHORTER), 2 * len(_SHORTER) + 1, 3 * len(_SHORTER) + 2), "pool")
        pool = [draw.near(1, max(1, min(most, _LONG_OTHER)), "other", number) for number in range(size)]
    if draw.below(3, "second") == 0 and requests < _RUNS_FROM:
        pool[0] = max(1, most)
    found = [max(1, min(pool[number // run % len(pool)], most)) for number in range(requests)]
    if others == "no context":
        empty = draw.pick((1, 2, 3), "empty")
        found[: requests - 1] = [0 if number % empty == 0 else kv for number, kv in enumerate(found[: requests - 1])]
    return found
