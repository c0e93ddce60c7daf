"""Cases of a whole MLA layer, a batch of prefills and decodes over a paged cache that it writes into; no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice, product
from typing import ClassVar, NamedTuple

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, cached, dimensions, space
from mla_conformance.cases.batches import WITH_DECODES, WITH_PREFILLS
from mla_conformance.cases.case import Call, at_least, given, one_of
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, first
from mla_conformance.cases.grammar import Data, Fields, Lengths
from mla_conformance.cases.space import NOTHING, Row, Rule, counted, measured, never, plain, rule, values
from mla_conformance.reference.chunking import MAX_WORKSPACE_TOKENS, ContextChunk, plan_context_chunks

LATENTS = (
    *(Data.NORMAL, Data.OUTLIERS, Data.LOW_RANK, Data.INTEGERS, Data.RISING, Data.TINY_VALUES),
    *("large", "tiny_tiles", "zero_tiles"),
)
"""What cached latents are like: as a regime of that name makes keys, 64 times as large, or with a tile of each entry
a millionth of the others, or zeros."""


class Order(StrEnum):
    PREFILLS_FIRST = "prefills_first"  # as the earlier builder lays out a batch of requests
    DECODES_FIRST = "decodes_first"  # as the present builder wants a batch reordered


@dataclass(frozen=True, kw_only=True)
class LayerCase(cached.CachedCase):
    role: ClassVar[Role] = Role.LAYER
    calls: ClassVar[tuple[Call, ...]] = (Call.LAYER,)
    merges_ranks: ClassVar[bool] = False  # ranks of a layer merge their states themselves

    decodes: int = at_least(0, 0, "requests of the batch that decode")
    order: str = one_of(Order, Order.PREFILLS_FIRST, "which requests of the batch come first")
    latents: str = one_of(
        LATENTS,
        Data.NORMAL,
        "what the latents are like; `data` is about the queries alone, since ids are older than this field",
    )
    weights: str = one_of(
        ("selection", "dense"),
        "selection",
        "whether a column of `kv_b_proj` picks one latent, so that nothing rounds, or weighs all of them",
    )
    model: int = at_least(
        0, 0, "number of the weights, which all batches of the same head dims then have; 0 draws them with the batch"
    )
    out: bool = given(False, "whether an output tensor is handed in")

    @property
    def decoding(self) -> range:
        first = 0 if self.order == Order.DECODES_FIRST else len(self.q) - self.decodes
        return range(first, first + self.decodes)

    @property
    def padding_counts(self) -> bool:
        """Whether rows of padding are requests; behind prefills that come last, no decode can follow."""
        return self.order == Order.PREFILLS_FIRST or self.decodes == len(self.q)

    @property
    def decode_queries(self) -> tuple[int, ...]:
        return self.q[self.decoding.start : self.decoding.stop] + (1,) * (self.pad * self.padding_counts)

    @property
    def prefill_contexts(self) -> tuple[int, ...]:
        return tuple(kv for index, kv in enumerate(self.kv) if index not in self.decoding)

    @property
    def workspace_tokens(self) -> int:
        """Tokens of the workspace that a layer gathers context into: no layer has more than 128 Ki."""
        return min(self.workspace, MAX_WORKSPACE_TOKENS)

    def planned(
        self, contexts: Sequence[int], planner: Callable[..., tuple[ContextChunk, ...]] = plan_context_chunks
    ) -> tuple[ContextChunk, ...]:
        return planner(contexts, workspace_tokens=self.workspace_tokens, page_size=self.page)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.decodes > len(self.q):
            yield f"field decodes: expected at most the {len(self.q)} requests of a layer, got {self.decodes}"
        longest, prefills = max(self.decode_queries, default=1), self.q[self.decodes :]
        if self.order == Order.DECODES_FIRST and min(prefills, default=longest + 1) <= longest:
            yield (
                f"order decodes_first: a builder knows a prefill by more query tokens than a decode has, expected more "
                f"than {longest}, got q={list(self.q)} with {self.decodes} decodes"
            )
        widest = max(self.dimensions.qk_nope_head_dim, self.dimensions.v_head_dim)
        if self.weights == "selection" and widest > self.kv_lora_rank:
            yield f"field dims: a layer's weights pick latents, P and V may not exceed L, got {self.dims}"
        if (pages := sum(map(bool, self.prefill_contexts)) * self.page) > self.workspace_tokens:
            yield f"field workspace: expected a page for each context, {pages:,} tokens, got {self.workspace_tokens:,}"
        if self.heads % self.ranks:
            yield f"field heads: expected a multiple of the {self.ranks} ranks, got {self.heads}"
        if self.ranks > 1 and (self.weights == "dense" or self.out):
            yield (
                f"field ranks: expected weights=selection and no out where {self.ranks} ranks share the tokens, got "
                f"weights={self.weights}, out={self.out}"
            )


TOKENS = Numbers(
    {
        **{**space.spans("17 to 64"), **space.exactly(1), "2 to 16": ((9,), range(2, 17))},
        **space.spans("65 to 256", "257 to 1,024"),
    }
)
CHUNKS = Numbers({**space.exactly(1, 0, 2), **space.spans("3 to 8", "9 to 64")})
_MOST_KEYS = 2**20
_TOO_MANY = f"more than {_MOST_KEYS:,} keys times heads, which the golden layer multiplies out"
_SHORT = 17


def _chunks(case: LayerCase) -> int:
    return len(plan_context_chunks(case.prefill_contexts, workspace_tokens=case.workspace, page_size=case.page))


class _Batch(NamedTuple):
    queries: Lengths  # query tokens of its decodes, over and over; none without decodes
    tokens: int  # new tokens of its longest prefill; 0 without prefills
    page: int  # tokens of a page
    longest: int  # tokens of its longest request, which prefills unless no prefill has a context
    share: int  # tokens of a context in a chunk


_SHAPE = ("order", "queries", "tokens", "others", "chunks", "longest", "tile", "page", "last page")


def _batches(*classes: str, draw: Draw = PLAIN) -> Iterator[_Batch]:
    order, queries, tokens, others, chunks, longest, tile, page, last = classes
    patterns = batches.query_tokens(queries, draw) if queries else ((),)
    for pattern, size in product(patterns, draw.some(batches.PAGES, page)):
        if chunks == "0" and not pattern:  # nothing is longer than the new tokens of the longest prefill
            same = batches.drawn_in_tile(TOKENS, tokens, tile, 1, size, last, draw)
            yield from (
                _Batch(pattern, n, size, n, size) for n in same if n > 1 and batches.LONGEST.class_of(n) == longest
            )
            continue
        known = max(pattern, default=1) + 1 if order == Order.DECODES_FIRST else 0
        for new in filter(lambda new: new >= known, draw.some(TOKENS, tokens)) if tokens else (0,):
            least = max(max(pattern, default=0), new) + max(batches.BEYOND[others], 1 if tokens else 0)
            for length in batches.lengths(longest, tile, least, size, last, draw):
                share = _share(length - new, size, chunks, draw)
                if share:
                    yield _Batch(pattern, new, size, length, share)


def _share(context: int, page: int, chunks: str, draw: Draw) -> int:
    """Whole pages of a context in a chunk, so that there are so many; 0 where there is no such number."""
    if chunks in (NOTHING, "0"):
        return page
    shares = (-(-context // (number * page)) * page for number in draw.some(CHUNKS, chunks))
    return next((share for share in shares if CHUNKS.class_of(-(-context // share)) == chunks), 0)


def _heads(heads: str, ranks: str, draw: Draw = PLAIN) -> list[int]:
    shares = draw.of(dimensions.RANKS, ranks, "ranks")
    return [number for number in draw.some(batches.HEADS, heads) if number % shares == 0]


def _few_keys(requests: str, others: str, longest: str, heads: str) -> bool:
    each = batches.LONGEST.least(longest) if others == "equal" else _SHORT
    keys = batches.LONGEST.least(longest) + batches.REQUESTS.least(requests) * each
    return keys * batches.HEADS.first(heads) <= _MOST_KEYS


def _longer(order: str, queries: str, tokens: str) -> bool:
    if order == Order.PREFILLS_FIRST or tokens == NOTHING:
        return True
    return TOKENS.first(tokens) > batches.most_queries(queries or "1")


def _fields(row: Row, draw: Draw) -> Fields:
    batch = first(_batches(*(row[name] for name in _SHAPE), draw=draw))
    requests = draw.of(batches.REQUESTS, row["requests"])
    decodes = batches.decodes_of(row, requests, draw)
    prefills = _prefills(batch, requests - decodes, row, draw)
    decoding = _decodes(batch, decodes, row, draw)
    with_context = sum(kv > 0 for _, kv in prefills)
    joined = decoding + prefills if row["order"] == Order.DECODES_FIRST else prefills + decoding
    workspace = with_context * batch.share
    # A few tokens more where a builder, which makes eight longest sequences of them or four pages a request, would have
    # less than a page for each context.
    built = max(8 * max(1, workspace // 8), 4 * max(1, workspace // 4 // batch.page) * batch.page)
    workspace = workspace if built >= with_context * batch.page else -(-workspace // 8) * 8
    return {
        "call": Call.LAYER,
        "heads": first(_heads(row["heads"], row["ranks"], draw)),
        "q": tuple(q for q, _ in joined),
        "kv": tuple(kv for _, kv in joined),
        "decodes": decodes,
        "page": batch.page,
        **({"workspace": workspace} if with_context else {}),
        **dimensions.spare_blocks(row, batch.page, draw),
    }


def _prefills(batch: _Batch, requests: int, row: Row, draw: Draw) -> list[tuple[int, int]]:
    if row["chunks"] == "0" or not requests:
        return [(batch.tokens, 0)] * requests
    requests = min(requests, MAX_WORKSPACE_TOKENS // batch.page)  # each context has a page of the workspace
    longest = (batch.tokens, batch.longest - batch.tokens)
    if row["others"] == "equal":
        return [longest] * requests
    new = min(batch.tokens, max(batch.queries, default=1) + 1)
    most = min(longest[1], batch.longest - new - 1)
    others = batches.contexts_of(row["others"], requests, most, draw)[1:]
    found = [(new + draw.below(max(1, batch.tokens - new), "new", n % 5), kv) for n, kv in enumerate(others)]
    place = draw.below(requests, "longest prefill")
    return [*found[:place], longest, *found[place:]]


def _decodes(batch: _Batch, requests: int, row: Row, draw: Draw) -> list[tuple[int, int]]:
    q = tuple(islice(cycle(batch.queries), requests))
    if row["others"] == "equal":
        return [(new, batch.longest - new) for new in q]
    contexts = batches.contexts_of(row["others"], requests, batch.longest - 1, draw)
    found = [(new, max(0, min(kv, batch.longest - new - 1))) for new, kv in zip(q, contexts, strict=True)]
    if requests and row["chunks"] in (NOTHING, "0"):
        place = batches.place_of_longest(q, draw) if draw else q.index(max(q))
        found[place] = (max(q), batch.longest - max(q))
    return found


LAYER = space.Space(
    role=Role.LAYER,
    capability="layer_combinations",
    dimensions=(
        batches.KIND,
        values("order", "order", Order.PREFILLS_FIRST, Order.DECODES_FIRST),
        *dimensions.cache(*cached.CACHES),
        values("dims", "dims", "r1", "glm", "32-16-32-64", "128-0-128-512", "64-16-96-64"),
        dimensions.DTYPE,
        batches.MEASURED_HEADS,
        *dimensions.ranks(),
        batches.NUMBER,
        measured(
            "queries", batches.DECODE_QUERIES, lambda case: batches.query_class(case.decode_queries), WITH_DECODES
        ),
        counted(
            "tokens", TOKENS, lambda case: max(q for n, q in enumerate(case.q) if n not in case.decoding), WITH_PREFILLS
        ),
        measured("others", batches.OTHERS, batches.others_class),
        *batches.TOTALS,
        *batches.pages(),
        counted("chunks", CHUNKS, _chunks, WITH_PREFILLS),
        values("latents", "latents", *LATENTS),
        values("weights", "weights", "selection", "dense"),
        plain("out", {"none": {"out": False}, "given": {"out": True}}),
        *dimensions.INPUTS,
        *dimensions.storage(),
        *dimensions.AROUND,
    ),
    rules=(
        dimensions.ROOM,
        never("weights that pick latents pick one a column", {"weights": ("selection",), "dims": ("64-16-96-64",)}),
        never("ranks share no weighed latents", {"weights": ("dense",), "ranks": dimensions.SEVERAL_RANKS}),
        never(
            "weights of such dims are dense, which ranks do not share",
            {"dims": ("64-16-96-64",), "ranks": dimensions.SEVERAL_RANKS},
        ),
        never("ranks are handed no output", {"out": ("given",), "ranks": dimensions.SEVERAL_RANKS}),
        Rule("ranks have equal shares of the heads", ("heads", "ranks"), lambda *classes: bool(_heads(*classes))),
        *batches.LONE_RULES,
        batches.NOT_BOTH,
        never("one request does not both", {"others": ("alone",), "requests that": ("both",)}),
        never("behind prefills no row of padding is a request", {"requests that": ("prefills",), "padding": ("some",)}),
        batches.LONE_PADDING,
        rule("prefills behind decodes are longer, by which they are known", _longer, always=True),
        never("without contexts of prefills some have none", {"chunks": ("0",), "others": ("shorter", "equal")}),
        Rule(
            _TOO_MANY,
            ("others", "longest", "heads"),
            lambda others, *rest: _few_keys("1" if others == "alone" else "2 to 7", others, *rest),
        ),
        rule(_TOO_MANY, _few_keys),
        rule(
            _TOO_MANY,
            lambda ranks, longest: dimensions.RANKS.first(ranks) * batches.LONGEST.least(longest) <= _MOST_KEYS,
        ),
        rule(
            "a request is no shorter than its new tokens",
            lambda tokens, longest: TOKENS.least(tokens) <= batches.LONGEST.parts[longest][0][-1],
        ),
        batches.IN_BOTH,
        *batches.END_RULES,
        Rule("no batch has such lengths and chunks", _SHAPE, lambda *classes: any(_batches(*classes)), always=True),
    ),
    shape=_fields,
    small={**batches.SMALL_BATCHES, "tokens": ("17 to 64", "1", "2 to 16"), "dims": ("32-16-32-64",)},
    grids=(("queries", "cache"),),
)
