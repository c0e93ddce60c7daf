"""What varies in the cases of a preparation. No torch."""

from itertools import cycle, islice

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches
from mla_conformance.cases.case import Call
from mla_conformance.cases.classes import Draw, Numbers
from mla_conformance.cases.dimensions import LAYOUT, PADDING, POISONS, SCALE, numbers
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Row, Rule, Space, measured, never, plain, values
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.roles.prepare.case import PAIRS, VALUES

_QUERIES = ("1", "2", batches.MIXED, "3", "4", "17 to 4,096")
_WIDE = "192-64-256-256"
_DIMS = ("64-64-128-128", "96-32-128-128", "2-126-128-128", "32-32-64-64", _WIDE)
_POSITIONS = Numbers(
    {
        "up to 1,024": ((200,), range(1, 1025)),
        "0": ((0,),),
        "beyond 1,024": ((4000,), range(1025, 2**16)),
        "beyond 2^16": ((70000,), range(2**16, 2**20)),
    }
)
_SHORT = (17, 5, 1, 64, 33)
_MANY = 8
_MOST_ROWS = 2**15


def _fields(row: Row, draw: Draw) -> Fields:
    number, most = draw.of(batches.REQUESTS, row["requests"]), draw.of(_POSITIONS, row["positions"])
    q = tuple(islice(cycle(batches.query_tokens(row["queries"], draw)[0]), number))
    others = (
        [draw.near(1, most, n % 16) if most else 0 for n in range(number)]
        if draw
        else [min(most, _SHORT[n % len(_SHORT) if n < _MANY else 0]) for n in range(number)]
    )
    longest = draw.below(number, "longest")
    kv = (*others[:longest], most, *others[longest + 1 :])
    return {"call": Call.PREPARE_INDEX, "q": q, "kv": kv}


def _few(heads: str, queries: str, requests: str) -> bool:
    tokens = max(batches.MIXED_QUERIES[0]) if queries == batches.MIXED else batches.QUERIES.first(queries)
    return batches.HEADS.first(heads) * tokens * batches.REQUESTS.first(requests) <= _MOST_ROWS


PREPARE = Space(
    role=Role.PREPARE,
    capability="prepare_combinations",
    dimensions=(
        values("dtype", "dtype", "bf16", "fp16", "fp32"),
        values("data", "data", *VALUES),
        values("dims", "dims", *_DIMS),
        values("pairs", "pairs", *PAIRS),
        plain("rotated", {"first": {"rope_last": False}, "last": {"rope_last": True}}),
        plain("hadamard", {"transformed": {"hadamard": True}, "as they are": {"hadamard": False}}),
        values("scales", "scales", *TILE_SCALES),
        plain("weights", {"folded": {"fold": True}, "left": {"fold": False}}),
        plain("projection", {"apart": {"fused": False}, "fused": {"fused": True}}),
        numbers("eps", "eps", Numbers({"1e-6": ((1,),), "1e-5": ((10,), range(2, 1000))}, sizes=False)),
        numbers("heads", "heads", batches.HEADS),
        measured("queries", _QUERIES, lambda case: batches.query_class(case.q)),
        batches.NUMBER,
        measured(
            "positions",
            _POSITIONS,
            lambda case: _POSITIONS.class_of(max(case.kv)),
            of_request=lambda case, request: _POSITIONS.class_of(case.kv[request]),
        ),
        LAYOUT,
        SCALE,
        PADDING,
        POISONS,
    ),
    rules=(
        never("weights take one scale of a query", {"dims": (_WIDE,), "weights": ("folded",)}),
        never("one request has no mixed queries", {"requests": ("1",), "queries": (batches.MIXED,)}),
        Rule(f"more than {_MOST_ROWS:,} rows of heads", ("heads", "queries", "requests"), _few),
    ),
    shape=_fields,
    small={
        "heads": ("16", "1", "odd", "8", "24", "even"),
        "queries": ("1", "2", batches.MIXED, "3", "4"),
        "requests": ("2 to 7", "1", "8 to 63"),
        "positions": ("up to 1,024", "0", "beyond 1,024"),
    },
    grids=(("queries",),),
)
