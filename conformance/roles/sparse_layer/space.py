"""What varies in the cases of a sparse layer. No torch."""

from collections.abc import Iterator

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches
from mla_conformance.cases.batches import WITH_DECODES, WITH_PREFILLS
from mla_conformance.cases.cached import TAILS
from mla_conformance.cases.case import Call
from mla_conformance.cases.classes import Draw, Numbers, exactly, first
from mla_conformance.cases.dimensions import LAYOUT, PADDING, POISONS, SCALE, numbers, room
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Only, Row, Rule, Space, measured, never, plain, values
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.roles.indexer.case import CODES, PLAIN
from mla_conformance.roles.prepare.case import PAIRS
from mla_conformance.roles.sparse_layer.case import LATENTS, SparseLayerCase

_HEADS = Numbers(exactly(4, 16, 1, 5, 32))
_RANKS = Numbers(exactly(1, 2, 4, 8, 16))
_REQUESTS = Numbers({"2 to 7": ((3,), range(2, 8)), "1": ((1,),), "8 to 63": ((9,), range(8, 64))})
_SELECTED = {(4, 8): "8 by 4 heads", (9, 16): "16 by 9 heads", (2, 2): "2 by 2 heads", (9, 32): "32 by 9 heads"}
_KEYS = ("more", "one more", "as many", "fewer")
_MORE = (70, 41, 130)
_MOST_MORE = 1200
_STANDS = Draw()
_SHORT = (17, 5, 1, 33)
_QUERIES, _TOKENS = (
    Numbers(exactly(1, 2, 3)),
    Numbers({"2 to 16": ((5,), range(2, 17)), "17 to 64": ((20,), range(17, 65))}),
)
_TILES = Only("cache", ("fp8_ds_mla",), "only tiles have scales of either kind")
_PLAIN = Only("cache", ("auto",), "the latents of a cache of codes are codes")
_CODED = Only("index cache", (CODES,), "only codes have scales")
_OWN = Only("selection", ("own",), "only an indexer has conventions")


def _keys(case: SparseLayerCase) -> str:
    """The tokens of the longest request against those that are selected."""
    beyond = max(case.totals) - case.topk
    return "more" if beyond > 1 else {1: "one more", 0: "as many"}.get(beyond, "fewer")


def _longest(selected: str, keys: str, draw: Draw = _STANDS) -> tuple[int, ...]:
    topk = next(topk for (_, topk), label in _SELECTED.items() if label == selected)
    near = {"one more": topk + 1, "as many": topk, "fewer": topk - 1}
    if draw and keys == "fewer":
        return (draw.near(1, topk - 1, keys), topk - 1)
    if draw and keys == "more":
        return (draw.near(topk + 2, _MOST_MORE, keys),)
    return (near[keys],) if keys in near else tuple(length for length in _MORE if length > topk + 1)


def _shapes(row: Row, draw: Draw) -> Iterator[tuple[Fields, int]]:
    for (heads, topk), label in _SELECTED.items():
        if label == row["selected"]:
            yield from (({"index_heads": heads, "topk": topk}, n) for n in _longest(label, row["keys"], draw))


def _fields(row: Row, draw: Draw) -> Fields:
    selected, longest = first(_shapes(row, draw))
    number, that = draw.of(_REQUESTS, row["requests"]), row["requests that"]
    some = 1 + draw.below(number - 1, "decodes") if draw and number > 1 else -(-number // 2)
    decodes = {"decodes": number, "prefills": 0, "both": some}[that]
    drafted = _QUERIES.first(row["queries"]) if decodes else 0
    tokens = draw.of(_TOKENS, row["tokens"]) if row["tokens"] else 0
    q = (drafted,) * decodes + (min(tokens, longest),) * (number - decodes)
    short = [draw.near(1, longest, n) for n in range(len(_SHORT))] if draw else _SHORT
    ends = (draw.below(number, "longest"),) if draw else (0, number - 1)
    totals = [longest if n in ends else max(q[n], min(longest, short[n % len(short)])) for n in range(number)]
    kv = tuple(total - new for total, new in zip(totals, q, strict=True))
    return {"call": Call.SPARSE_LAYER, "q": q, "kv": kv, "decodes": decodes, **selected}


def _shared(heads: str, ranks: str) -> bool:
    return int(heads) % int(ranks) == 0


def _long_enough(selected: str, keys: str, new: str) -> bool:
    least = _TOKENS.first(new) if new in _TOKENS.parts else int(new)
    return max(_longest(selected, keys)) >= least


SPARSE_LAYER = Space(
    role=Role.SPARSE_LAYER,
    capability="sparse_layer_combinations",
    dimensions=(
        batches.KIND,
        values("dims", "dims", "32-32-32-128", "32-64-32-512", "64-126-64-128"),
        values("cache", "cache", "auto", "fp8_ds_mla"),
        values("data", "data", *(str(each) for each in LATENTS), only=_PLAIN),
        values("tile scales", "scales", *TILE_SCALES, only=_TILES),
        plain("selection", {"own": {"shared": False}, "shared": {"shared": True}}),
        values("index cache", "index_cache", CODES, PLAIN, only=_OWN),
        values("index scales", "index_scales", *TILE_SCALES, only=_CODED),
        values("pairs", "pairs", *PAIRS, only=_OWN),
        plain("rotated", {"first": {"rope_last": False}, "last": {"rope_last": True}}, only=_OWN),
        values("layer pairs", "layer_pairs", *PAIRS[::-1]),
        values("dtype", "dtype", "bf16", "fp16"),
        numbers("heads", "heads", _HEADS),
        numbers("ranks", "tp", _RANKS),
        measured("requests", _REQUESTS, lambda case: _REQUESTS.class_of(len(case.q))),
        measured("queries", _QUERIES, lambda case: _QUERIES.class_of(max(case.q[: case.decodes])), WITH_DECODES),
        measured("tokens", _TOKENS, lambda case: _TOKENS.class_of(max(case.q[case.decodes :])), WITH_PREFILLS),
        measured("selected", _SELECTED.values(), lambda case: _SELECTED.get((case.index_heads, case.topk))),
        measured("keys", _KEYS, _keys),
        numbers("page", "page", Numbers(exactly(64, 16, 128, 1))),
        values("tails", "tails", *TAILS),
        numbers("layers", "layers", Numbers({"1": ((1,),), "several": (range(2, 9),)})),
        LAYOUT,
        SCALE,
        PADDING,
        POISONS,
    ),
    rules=(
        Rule("the cache's entries have no room for such keys", ("cache", "dims", "dtype"), room),
        never("one request does not both", {"requests": ("1",), "requests that": ("both",)}),
        Rule("a request is no shorter than its new tokens", ("selected", "keys", "tokens"), _long_enough),
        Rule("a request is no shorter than its new tokens", ("selected", "keys", "queries"), _long_enough),
        Rule("ranks have equal shares of the heads", ("heads", "ranks"), _shared),
    ),
    shape=_fields,
    small={"requests": ("2 to 7", "1"), "heads": ("4", "1", "5"), "selected": ("8 by 4 heads", "2 by 2 heads")},
)
