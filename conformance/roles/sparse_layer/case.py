"""Cases of a sparse layer, hidden states in and out, and what varies in them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, cached, classes, dimensions, grammar
from mla_conformance.cases.case import Call, Sizes, at_least, given, one_of
from mla_conformance.cases.space import Only, Row, Rule, Space, counted, exactly, measured, plain, rule, values
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.roles.indexer.case import CODES, PLAIN
from mla_conformance.roles.prepare.case import PAIRS, ROTATED

INDEX_DIM = 128  # D, columns of an index key
MOST_QUERIES = 12  # of a latent query of 1536 columns, as DeepSeek's
WHOLE = 64
LATENTS = (grammar.Data.NORMAL, grammar.Data.INTEGERS)


@dataclass(frozen=True, kw_only=True)
class SparseLayerCase(cached.CachedCase):  # A question to a sparse layer; ``layout`` is that of the hidden states
    role: ClassVar[Role] = Role.SPARSE_LAYER
    calls: ClassVar[tuple[Call, ...]] = (Call.SPARSE_LAYER,)
    causal: ClassVar[bool] = False  # the lists alone say what is seen
    asked: ClassVar = {
        **{"index_cache": "index_{}", "index_heads": (64, "index_heads_{}"), "topk": (2048, "topk")},
        **{"shared": "shared", "tp": "tp"},
    }

    dtype: str = one_of(("bf16", "fp16"), "bf16")
    dims: str = "32-32-32-128"
    page: int = at_least(1, 64)
    data: str = one_of(
        LATENTS,
        grammar.Data.NORMAL,
        "what latents are like; of a cache of codes they are always whole numbers, which it stores as they are",
    )
    cache: str = one_of(("auto", "fp8_ds_mla"), "auto", "layout of the latent cache")
    decodes: int = at_least(0, 0, "requests that decode, the first ones")
    index_cache: str = one_of((CODES, PLAIN), CODES, "layout of the index cache")
    index_scales: str = one_of(TILE_SCALES, "float32", "of its codes")
    index_heads: int = at_least(2, 4, "heads of the indexer")
    topk: int = at_least(2, 8, "tokens selected for each query token")
    pairs: str = one_of(PAIRS, "halves", "what the indexer rotates together")
    rope_last: bool = given(False, "whether it rotates the last columns")
    layer_pairs: str = one_of(PAIRS, "neighbours", "what the layer rotates together")
    shared: bool = given(False, "whether an earlier layer's selection is reused")
    tp: int = at_least(1, 1, "ranks that share the heads, each with a replica of the indexer and caches of its own")

    @property
    def visible_lens(self) -> tuple[int, ...]:
        return tuple(min(self.topk, total) for total in self.totals)

    @property
    def q_lora_rank(self) -> int:  # columns of the latent query, each of which is one of an index query
        return self.queries * INDEX_DIM

    @property
    def queries(self) -> int:  # different index queries of a token; the heads have them in turn
        return min(self.index_heads, MOST_QUERIES)

    @property
    def topics(self) -> int:
        """Topics that a token selects: pairs, or fewer and larger ones; one or two for each query but one."""
        least = self.queries - 1
        if self.topk <= 4 * least:
            return self.topk // 2
        return next((n for n in range(2 * least, least - 1, -1) if n % 4 == 0 and self.topk % n == 0), 0)

    @property
    def hidden_size(self) -> int:
        """Columns of a hidden state: as many as are projected, or as the output has values, in whole 64s."""
        projected = self.q_lora_rank + sum(self.latent_dims) + INDEX_DIM + self.index_heads
        return -(-max(projected, self.heads * self.dimensions.v_head_dim) // WHOLE) * WHOLE

    @property
    def sizes(self) -> Sizes:
        return super().sizes._replace(key=self.hidden_size)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.index_cache == PLAIN and self.index_scales != "float32":
            yield f"field index_scales: an index cache of {PLAIN} has no scales, got {self.index_scales}"
        dims, rope = self.dimensions, self.rope_dim
        if self.decodes > len(self.q):
            yield f"field decodes: expected at most the {len(self.q)} requests, got {self.decodes}"
        if self.ranks > 1:
            yield f"field ranks: a sparse layer's ranks share heads, tp, and no tokens, got {self.ranks}"
        if self.heads % self.tp:
            yield f"field heads: expected a multiple of the {self.tp} ranks, got {self.heads}"
        if self.topk % 2 or self.topics < self.queries - 1:
            least = self.queries - 1
            sizes = ", ".join(str(n) for n in range(least, 2 * least + 1) if n % 4 == 0)
            beyond = f", or a multiple of one of {sizes} beyond" if sizes else ""
            yield (
                f"field topk: expected an even number from {2 * least} to {4 * least}{beyond}, "
                f"since {self.index_heads} index heads tell so many groups of keys apart, got {self.topk}"
            )
        if self.kv_lora_rank % WHOLE and (self.holds_codes or self.data == grammar.Data.INTEGERS):
            yield f"field data: {self.data} has latents of whole {WHOLE} columns, got dims={self.dims}"
        if not 0 < rope <= INDEX_DIM or rope % 2 or max(dims.qk_nope_head_dim, dims.v_head_dim) > self.kv_lora_rank:
            yield (
                f"field dims: expected pairs to rotate in {INDEX_DIM} columns, and P and V up to L, since weights pick "
                f"latents, got {self.dims}"
            )


_HEADS = classes.Numbers(
    {
        "4": ((4,), (2, 4, 6, 8, 12)),
        "16": ((16,), (16, 20, 24, 40)),
        "1": ((1,),),
        "5": ((5,), range(3, 14, 2)),
        "32": ((32,), (32, 48, 64, 96, 128)),
    }
)
_REQUESTS = classes.Numbers({"2 to 7": ((3,), range(2, 8)), "1": ((1,),), "8 to 63": ((9,), range(8, 64))})
_PAGES = classes.Numbers(
    {
        "64": ((64,), (64, 80, 96)),
        "16": ((16,), (8, 16, 32, 48)),
        "128": ((128,), (128, 256, 512)),
        "1": ((1,), (1, 2, 4)),
    }
)
_SELECTED = {  # index heads and K, those that stand for a class first
    "8 by 4 heads": ((4, 8), (4, 10), (4, 12), (5, 16), (3, 8)),
    "16 by 9 heads": ((9, 16), (8, 16), (8, 20), (9, 24), (7, 24)),
    "2 by 2 heads": ((2, 2), (2, 4), (3, 4)),
    "32 by 9 heads": ((9, 32), (8, 32), (9, 48), (16, 64), (9, 64)),
    # The first is the least that engines' kernels take.
    "128 by 32 heads": ((32, 128), (64, 128), (32, 256), (24, 192), (64, 512), (64, 1024), (64, 2048)),
}
_MOST_MORE = 1200
_SHORT = (17, 5, 1, 33)
_QUERIES = classes.Numbers(exactly(1, 2, 3))
_TOKENS = classes.Numbers({"2 to 16": ((5,), range(2, 17)), "17 to 64": ((20,), range(17, 65))})
_TILES = Only("cache", ("fp8_ds_mla",), "only tiles have scales of either kind")
_PLAIN = Only("cache", ("auto",), "the latents of a cache of codes are codes")
_CODED = Only("index cache", (CODES,), "only codes have scales")
_OWN = Only("selection", ("own",), "only an indexer has conventions")


def _selected(case: SparseLayerCase) -> str | None:
    return next((label for label, of in _SELECTED.items() if (case.index_heads, case.topk) in of), None)


def _keys(case: SparseLayerCase) -> str:
    beyond = max(case.totals) - case.topk
    return "more" if beyond > 1 else {1: "one more", 0: "as many"}.get(beyond, "fewer")


def _longest(topk: int, keys: str, draw: classes.Draw = classes.PLAIN) -> tuple[int, ...]:
    near = {"one more": topk + 1, "as many": topk, "fewer": topk - 1}
    if draw and keys == "fewer":
        return (draw.near(1, topk - 1, keys), topk - 1)
    if draw and keys == "more":
        return (draw.near(topk + 2, max(_MOST_MORE, 2 * topk), keys),)
    return (near[keys],) if keys in near else tuple(length for length in (70, 41, 130) if length > topk + 1)


def _fields(row: Row, draw: classes.Draw) -> grammar.Fields:
    heads, topk = draw.pick(_SELECTED[row["selected"]], "selected")
    longest = classes.first(_longest(topk, row["keys"], draw))
    number = draw.of(_REQUESTS, row["requests"])
    decodes = batches.decodes_of(row, number, draw)
    drafted = _QUERIES.first(row["queries"]) if decodes else 0
    tokens = draw.of(_TOKENS, row["tokens"]) if row["tokens"] else 0
    q = (drafted,) * decodes + (min(tokens, longest),) * (number - decodes)
    short = [draw.near(1, longest, n) for n in range(len(_SHORT))] if draw else _SHORT
    ends = (draw.below(number, "longest"),) if draw else (0, number - 1)
    totals = [longest if n in ends else max(q[n], min(longest, short[n % len(short)])) for n in range(number)]
    kv = tuple(total - new for total, new in zip(totals, q, strict=True))
    return {"call": Call.SPARSE_LAYER, "q": q, "kv": kv, "decodes": decodes, "index_heads": heads, "topk": topk}


def _long_enough(selected: str, keys: str, new: str) -> bool:
    least = _TOKENS.first(new) if new in _TOKENS.parts else int(new)
    return max(_longest(_SELECTED[selected][0][1], keys)) >= least


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
        replace(ROTATED, only=_OWN),
        values("layer pairs", "layer_pairs", *PAIRS[::-1]),
        values("dtype", "dtype", "bf16", "fp16"),
        dimensions.numbers("heads", "heads", _HEADS),
        dimensions.numbers("ranks", "tp", classes.Numbers(exactly(1, 2, 4, 8, 16))),
        counted("requests", _REQUESTS, lambda case: len(case.q)),
        counted("queries", _QUERIES, lambda case: max(case.q[: case.decodes]), batches.WITH_DECODES),
        counted("tokens", _TOKENS, lambda case: max(case.q[case.decodes :]), batches.WITH_PREFILLS),
        measured("selected", _SELECTED, _selected),
        measured("keys", ("more", "one more", "as many", "fewer"), _keys),
        dimensions.numbers("page", "page", _PAGES),
        values("tails", "tails", *cached.TAILS),
        dimensions.numbers("layers", "layers", classes.Numbers({"1": ((1,),), "several": (range(2, 9),)})),
        dimensions.LAYOUT,
        dimensions.SCALE,
        *dimensions.AROUND,
    ),
    rules=(
        dimensions.ROOM,
        batches.NOT_BOTH,
        Rule("a request is no shorter than its new tokens", ("selected", "keys", "tokens"), _long_enough),
        Rule("a request is no shorter than its new tokens", ("selected", "keys", "queries"), _long_enough),
        rule("ranks have equal shares of the heads", lambda heads, ranks: int(heads) % int(ranks) == 0),
    ),
    shape=_fields,
    small={"requests": ("2 to 7", "1"), "heads": ("4", "1", "5"), "selected": ("8 by 4 heads", "2 by 2 heads")},
)
