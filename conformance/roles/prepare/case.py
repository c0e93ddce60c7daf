"""Cases of a preparation, index queries, keys and weights to codes and scales, and what varies in them. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, classes, grammar
from mla_conformance.cases.case import Call, Case, Sizes, at_least, given, one_of
from mla_conformance.cases.dimensions import AROUND, DTYPE, LAYOUT, SCALE, numbers
from mla_conformance.cases.space import Row, Rule, Space, by_length, measured, never, plain, values
from mla_conformance.reference.entry_formats import TILE_SCALES

VALUES = ("normal", "outliers", "integers", "shifted", "tiny_values", "zeros")
"""What queries and keys are like; ``problem.py`` says what each reveals."""
PAIRS = ("halves", "neighbours")
BLOCK = 128  # columns that share a scale


@dataclass(frozen=True, kw_only=True)
class PrepareCase(Case):  # ``q`` tokens of each request, behind ``kv`` others; a head has P + R columns of ``dims``
    role: ClassVar[Role] = Role.PREPARE
    calls: ClassVar[tuple[Call, ...]] = (Call.PREPARE_INDEX,)
    longer: ClassVar[Mapping[str, int]] = {"kv": 13}
    causal: ClassVar[bool] = False  # no token meets another
    # Beyond DeepSeek-V3.2's: the first columns in halves, transformed, with folded weights.
    asked: ClassVar = {
        **{"dtype": "{}", "pairs": "{}", "rope_last": "rope_last", "hadamard": "untransformed", "scales": "{}"},
        **{"fold": "unfolded", "heads": "heads_{}", "head_dim": (BLOCK, "head_dim_{}")},
    }

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    heads: int = at_least(1, 64)
    data: str = one_of(VALUES, "normal", "what queries and keys are like", joined=True)
    pairs: str = one_of(PAIRS, "halves", "what is rotated together, columns R/2 apart or neighbours")
    rope_last: bool = given(False, "whether the last R columns are rotated, not the first")
    hadamard: bool = given(True, "whether queries and keys pass through the Hadamard transform")
    scales: str = one_of(TILE_SCALES, "float32", "of the codes, any float32 numbers or powers of two")
    fold: bool = given(
        True,
        "whether the weights take the scales of the queries, the softmax scale and heads^-1/2; else the scales are "
        "returned",
    )
    fused: bool = given(False, "whether keys and weights, of the model's dtype, are columns of one projection")
    eps: int = at_least(1, 1, "of the keys' norm, in millionths")

    @property
    def visible_lens(self) -> tuple[int, ...]:
        return (self.head_dim,) * len(self.q)

    @property
    def sizes(self) -> Sizes:
        columns = self.head_dim
        return super().sizes._replace(columns=columns, row=self.heads * columns, key=self.rope_dim)

    def contradictions(self) -> Iterator[str]:
        width, rope = self.head_dim, self.rope_dim
        if min(self.q) < 1:
            yield f"{self.call} expects at least one token a request, got q={list(self.q)}"
        if rope % 2 or not rope or (width > BLOCK and width % BLOCK):
            yield f"expected pairs to rotate and whole blocks of {BLOCK} columns, got dims={self.dims}"
        if self.hadamard and width & (width - 1):
            yield f"a Hadamard transform takes a power of two columns, got dims={self.dims}"
        if self.fold and width > BLOCK:
            yield f"weights take one scale of a query, so fold=1 has up to {BLOCK} columns, got {width}"


ROTATED = plain("rotated", {"first": {"rope_last": False}, "last": {"rope_last": True}})
_WIDE = "192-64-256-256"
_POSITIONS = classes.Numbers(
    {
        "up to 1,024": ((200,), range(1, 1025)),
        "0": ((0,),),
        "beyond 1,024": ((4000,), range(1025, 2**15)),
        "beyond 2^15": ((40_000,), range(2**15, 2**16)),
        "beyond 2^16": ((70000,), range(2**16, 2**20)),
    }
)
_MOST_ROWS = 2**15


def _fields(row: Row, draw: classes.Draw) -> grammar.Fields:
    number, most = draw.of(batches.REQUESTS, row["requests"]), draw.of(_POSITIONS, row["positions"])
    q = tuple(islice(cycle(batches.query_tokens(row["queries"], draw)[0]), number))
    kv = [min(most, draw.near(1, max(1, most), n % 16) if draw else batches.short(n)) for n in range(number)]
    kv[draw.below(number, "longest")] = most
    return {"call": Call.PREPARE_INDEX, "q": q, "kv": tuple(kv)}


def _few(heads: str, queries: str, requests: str) -> bool:
    tokens = max(batches.query_tokens(queries, classes.PLAIN)[0])
    return batches.HEADS.first(heads) * tokens * batches.REQUESTS.first(requests) <= _MOST_ROWS


PREPARE = Space(
    role=Role.PREPARE,
    capability="prepare_combinations",
    dimensions=(
        DTYPE,
        values("data", "data", *VALUES),
        values("dims", "dims", "64-64-128-128", "96-32-128-128", "2-126-128-128", "32-32-64-64", _WIDE),
        values("pairs", "pairs", *PAIRS),
        ROTATED,
        plain("hadamard", {"transformed": {"hadamard": True}, "as they are": {"hadamard": False}}),
        values("scales", "scales", *TILE_SCALES),
        plain("weights", {"folded": {"fold": True}, "left": {"fold": False}}),
        plain("projection", {"apart": {"fused": False}, "fused": {"fused": True}}),
        numbers("eps", "eps", classes.Numbers({"1e-6": ((1,),), "1e-5": ((10,), range(2, 1000))}, sizes=False)),
        numbers("heads", "heads", batches.HEADS),
        measured("queries", batches.ROW_QUERIES, lambda case: batches.query_class(case.q)),
        batches.NUMBER,
        by_length("positions", _POSITIONS, lambda case: case.kv),
        LAYOUT,
        SCALE,
        *AROUND,
    ),
    rules=(
        never("weights take one scale of a query", {"dims": (_WIDE,), "weights": ("folded",)}),
        batches.UNMIXED,
        Rule(f"more than {_MOST_ROWS:,} rows of heads", ("heads", "queries", "requests"), _few),
    ),
    shape=_fields,
    small={
        "heads": batches.FEW_HEADS,
        "queries": ("1", "2", batches.MIXED, "3", "4"),
        "requests": batches.FEW_REQUESTS,
        "positions": ("up to 1,024", "0", "beyond 1,024"),
    },
    grids=(("queries",),),
)
