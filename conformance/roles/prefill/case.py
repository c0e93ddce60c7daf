"""Cases of a prefill backend: new tokens, a chunk of context, or one in chunks merged with them; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, dimensions, grammar, space
from mla_conformance.cases.case import Call, Case, at_least, given, one_of
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, first
from mla_conformance.cases.space import Only, Row, by_length, counted, measured, never, plain, rule, values
from mla_conformance.reference.chunking import PLANNERS

MOST_SLICES = 2**18  # slices of contexts that a plan may have; those of the suite have up to 138


@dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    role: ClassVar[Role] = Role.PREFILL
    calls: ClassVar[tuple[Call, ...]] = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)
    profile = ""
    longer: ClassVar[Mapping[str, int]] = {"q": 3, "kv": 0}
    asked: ClassVar = {"quant": "quant_output", "merge": "own_merge"}
    # Ids are older than roles with fields of their own.
    follows: ClassVar[Mapping[str, str]] = {
        "planner": "workspace",
        "out": "lse",
        "quant": "out",
        "oscale": "quant",
        "merge": "inflate",
    }

    planner: str = one_of(PLANNERS, "equal", "who plans the chunks, a name in the reference's `PLANNERS`")
    out: bool = given(False, "whether an output tensor is handed in")
    quant: str = one_of(("none", "fp8"), "none", "quantisation of the output")
    oscale: int = at_least(1, 13000, "output scale in millionths")
    merge: str = one_of(
        ("golden", "own", "in_place"),
        "golden",
        "who merges partial states: the reference, or the backend's own `merge_attn_states`, into a fresh output or "
        "`in_place`, over the state that it merges into",
    )

    @property
    def is_merged(self) -> bool:
        return self.call == Call.CHUNKED_CONTEXT

    def contradictions(self) -> Iterator[str]:
        if not self.is_merged:
            return
        slices = slices_of(self.kv, self.workspace)
        if slices > MOST_SLICES:  # of which planning takes long
            yield f"field workspace: expected room for contexts in at most {MOST_SLICES:,} slices, got {slices:,}"
        try:  # which contexts there are decides, not how long they are
            some = [min(length, 1) for length in self.kv]
            PLANNERS[self.planner](some, workspace_tokens=self.workspace, page_size=self.page)
        except ValueError as error:
            yield f"field workspace: {error}"


def slices_of(contexts: Sequence[int], workspace: int) -> int:
    """Slices of contexts in the chunks that equal shares of a workspace make."""
    with_context = sum(map(bool, contexts))
    share = max(1, workspace // max(1, with_context))
    return len(contexts) * (max(contexts) // share + with_context)


TOKENS = Numbers(
    {
        **{**space.spans("65 to 256"), **space.exactly(1), **space.spans("2 to 16", "17 to 64", "257 to 1,024")},
        "> 2^10": (range(1025, 4097),),
    }
)
CHUNKS = Numbers({**space.exactly(2, 1), **space.spans("3 to 8", "9 to 64"), "more than 64": (range(65, 2**16),)})
OUTPUT_SCALES = Numbers(
    {
        "usual": ((13_000,), range(5_000, 100_000)),
        "small": ((300,), range(1, 5_000)),
        "large": ((1_000_000,), range(100_000, 2**31)),
    },
    sizes=False,
)
_tokens = partial(batches.drawn_in_tile, TOKENS)
_SHORT = 17
_MOST_ROWS, _MOST_KEYS = 2**19, 2**23 + 2**18  # rows and keys times heads, of a batch in the covering arrays
_NEW = Only("call", (Call.NEW_TOKENS,), "only new tokens are asked without an LSE, or with quantised results")
_GIVEN = Only("call", (Call.NEW_TOKENS, Call.CHUNKED_CONTEXT), "a chunk of context is handed no output")
_CONTEXT = Only("call", (Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT), "new tokens alone have no context")
_CHUNKED = Only("call", (Call.CHUNKED_CONTEXT,), "only a context in chunks is planned, paged and merged")
_QUANTISED = Only("quant", ("fp8",), "only quantised results have a scale")


def _others(lengths: grammar.Lengths) -> str:
    return "empty" if 0 in lengths and len(lengths) > 1 else batches.alike(lengths)


_BESIDE = ("shorter", "equal", "empty")
_OTHERS = ("shorter", "alone", "equal", "empty")


@cache
def _count(planner: str, contexts: grammar.Lengths, workspace: int, page: int) -> int:
    return len(PLANNERS[planner](contexts, workspace_tokens=workspace, page_size=page))


def _spread(requests: int, longest: int, others: str, draw: Draw = PLAIN) -> grammar.Lengths:
    """The longest in the middle, the same for most of the others, so that ids stay short; drawn ones stand anywhere."""
    if others == "equal":
        return (longest,) * requests
    if not draw:
        last, middle = min(_SHORT, longest - 1), requests // 2
        first = 0 if others == "empty" else last
        return (first,) * middle + (longest,) + (last,) * (requests - middle - 1)
    found = batches.contexts_of("no context" if others == "empty" else others, requests, longest - 1, draw)
    found[draw.below(requests, "longest")] = longest
    return tuple(found)


def _workspaces(contexts: grammar.Lengths, planner: str, page: int, chunks: str, draw: Draw = PLAIN) -> Iterator[int]:
    with_context, whole = sum(map(bool, contexts)), sum(contexts)
    for number in draw.some(CHUNKS, chunks):
        share = -(-max(contexts) // number)
        room = {"equal": with_context * page * -(-share // page), "greedy": max(page, -(-whole // number))}[planner]
        planned = slices_of(contexts, room) <= MOST_SLICES
        if planned and CHUNKS.class_of(_count(planner, contexts, room, page)) == chunks:
            yield room


def _planned(
    requests: str, contexts: str, context: str, context_tile: str, planner: str, page: str, chunks: str
) -> bool:
    longest = batches.lengths(context, context_tile, _BEYOND[contexts])[0]
    lengths = _spread(batches.REQUESTS.first(requests), longest, contexts)
    return any(any(_workspaces(lengths, planner, size, chunks)) for size in batches.PAGES.some[page])


def _fields(row: Row, draw: Draw) -> grammar.Fields:
    tokens, heads = first(_tokens(row["tokens"], row["tile"], draw=draw)), draw.of(batches.HEADS, row["heads"])
    requests = draw.of(batches.REQUESTS, row["requests"])
    fields: grammar.Fields = {"heads": heads, "q": _spread(requests, tokens, row["others"], draw)}
    if not row["context"]:
        return fields
    longest = first(batches.lengths(row["context"], row["context tile"], _BEYOND[row["contexts"]], draw=draw))
    contexts = _spread(requests, longest, row["contexts"], Draw(draw.key and f"{draw.key}|contexts"))
    if not row["chunks"]:
        return {**fields, "kv": contexts}
    plans = (
        {"page": page, "workspace": room}
        for page in draw.some(batches.PAGES, row["page"])
        for room in _workspaces(contexts, row["planner"], page, row["chunks"], draw)
    )
    return {**fields, "kv": contexts, **first(plans)}


_BEYOND = {"alone": 1, "equal": 1, "empty": 2, "shorter": 2}


def _few(most: int, least: int, requests: str, others: str, heads: str) -> bool:
    whole = batches.REQUESTS.least(requests) * (least if others == "equal" else _SHORT) + least
    return batches.HEADS.first(heads) * whole <= most


PREFILL = space.Space(
    role=Role.PREFILL,
    capability="combinations",
    dimensions=(
        values("call", "call", *PrefillCase.calls),
        values("dims", "dims", "r1", "glm", "small", "128-0-128-512", "16-8-40-32", "64-64-128-256"),
        values("dtype", "dtype", "bf16", "fp16", "fp32", "e4m3"),
        batches.MEASURED_HEADS,
        batches.NUMBER,
        measured("others", _OTHERS, lambda case: _others(case.q)),
        by_length("tokens", TOKENS, lambda case: case.q),
        by_length("tile", batches.TILE, lambda case: case.q),
        measured("contexts", _OTHERS, lambda case: _others(case.kv), _CONTEXT),
        by_length("context", batches.LONGEST, lambda case: case.kv, _CONTEXT),
        measured(
            "context tile",
            batches.TILE.parts,
            lambda case: batches.tile_class(max(case.kv)),
            _CONTEXT,
            lambda case, request: batches.tile_class(case.kv[request]) if case.kv[request] else None,
        ),
        values("planner", "planner", *PLANNERS, only=_CHUNKED),
        batches.pages(_CHUNKED)[0],
        counted("chunks", CHUNKS, lambda case: _count(case.planner, case.kv, case.workspace, case.page), _CHUNKED),
        values("merge", "merge", "golden", "own", "in_place", only=_CHUNKED),
        plain("out", {"none": {"out": False}, "given": {"out": True}}, _GIVEN),
        values("quant", "quant", "none", "fp8", only=_NEW),
        dimensions.numbers("output scale", "oscale", OUTPUT_SCALES, _QUANTISED),
        replace(dimensions.LSE, only=_NEW),
        *dimensions.INPUTS,
        *dimensions.AROUND,
        dimensions.MAXIMA,
    ),
    rules=(
        never("one request has no others", {"requests": ("1",), "others": _BESIDE}),
        never("one request has no others", {"requests": ("1",), "contexts": _BESIDE}),
        never("one request has no others", {"others": ("alone",), "contexts": _BESIDE}),
        never("of several requests none is alone", {"requests": batches.SEVERAL, "others": ("alone",)}),
        never("of several requests none is alone", {"requests": batches.SEVERAL, "contexts": ("alone",)}),
        never("of several requests none is alone", {"others": _BESIDE, "contexts": ("alone",)}),
        rule("no length is in both classes", lambda tokens, tile: bool(_tokens(tokens, tile))),
        never("no length is shorter than one, but none", {"tokens": ("1",), "others": ("shorter",)}),
        rule(
            "no length is in both classes",
            lambda contexts, context, context_tile: bool(batches.lengths(context, context_tile, _BEYOND[contexts])),
        ),
        rule(
            f"more than {_MOST_ROWS:,} rows times heads",
            lambda requests, others, tokens, heads: _few(_MOST_ROWS, TOKENS.least(tokens), requests, others, heads),
        ),
        rule(
            f"more than {_MOST_KEYS:,} keys times heads",
            lambda requests, contexts, context, heads: _few(
                _MOST_KEYS, batches.LONGEST.least(context), requests, contexts, heads
            ),
        ),
        rule("no workspace makes so many chunks", _planned),
    ),
    shape=_fields,
    small={
        "dims": ("small", "16-8-40-32"),
        "heads": batches.FEW_HEADS,
        "requests": batches.FEW_REQUESTS,
        "tokens": ("65 to 256", "1", "2 to 16", "17 to 64"),
        "others": ("shorter", "alone", "empty"),
        "contexts": ("shorter", "alone", "empty"),
        "context": ("65 to 256", "1 to 16", "17 to 64"),
    },
    grids=(("call", "dtype"),),
)
