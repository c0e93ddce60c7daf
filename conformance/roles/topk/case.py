"""Cases of a top-k, rows of given logits with a window of columns each, and what varies in them. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, grammar, space
from mla_conformance.cases.case import Call, Case, Sizes, at_least, given, one_of
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, first
from mla_conformance.cases.dimensions import AROUND, COLUMNS, KEYS, LAYOUT, MAXIMA, against, numbers
from mla_conformance.cases.space import Only, Row, Rule, by_length, counted, measured, plain, rule, values

LOGITS = (  # what logits are like; ``problem.py`` says what each reveals
    *("normal", "integers", "ones", "last_bits", "relu", "zeros", "negative", "rising", "falling", "outliers"),
    *("beyond_half", "subnormal", "infinite", "masked", "nan"),
)
TIED = ("zeros", "subnormal")
"""Those of which some are equal and differ in their bits, so that a kernel's own order of ties is not theirs."""
_STEPS = 4  # each logit is ordered, selected and judged in float64


@dataclass(frozen=True, kw_only=True)
class TopKCase(Case):
    """A question to a top-k: the first row of each request sees ``kv`` columns, and each further one column more.

    ``layout`` is that of the rows of logits, ``inflate`` the factor of the columns over those that any row sees.
    """

    role: ClassVar[Role] = Role.TOPK
    calls: ClassVar[tuple[Call, ...]] = (Call.SELECT,)
    longer: ClassVar[Mapping[str, int]] = {"kv": 13}
    # Beyond 64 columns of rows that start at column 0.
    asked: ClassVar = {"packed": "row_starts", "dtype": "{}", "topk": "topk_{}", "pool": "pool_{}"}

    dtype: str = one_of(("fp32", "bf16", "fp16"), "fp32")
    dims: str = "small"
    heads: int = at_least(1, 1)
    data: str = one_of(LOGITS, "normal", "what the logits are like", joined=True)
    topk: int = at_least(1, 64, "columns selected for each row, or their tokens")
    packed: bool = given(
        False, "whether the columns of the requests stand behind one another, so that rows start at those of their own"
    )
    pool: int = at_least(1, 1, "tokens of a column")
    tail: bool = given(False, "whether the last, incomplete pool is selected besides")

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that each row sees, request by request; one a column where columns are no pools."""
        return tuple(kv + row for q, kv in zip(self.q, self.kv, strict=True) for row in range(q))

    @property
    def spans(self) -> tuple[int, ...]:
        return tuple((kv + max(0, q - 1)) // self.pool for q, kv in zip(self.q, self.kv, strict=True))

    @property
    def width(self) -> int:
        return max(1, sum(self.spans) if self.packed else max(self.spans)) * self.inflate

    @property
    def sizes(self) -> Sizes:
        return Sizes(columns=1, row=_STEPS * self.width, output=max(self.spans) + self.topk, key=0)

    def contradictions(self) -> Iterator[str]:
        if min(self.q) < 1:
            yield f"{self.call} expects at least one row a request, got q={list(self.q)}"
        if self.topk % self.pool or (self.tail and self.pool == 1):
            yield f"expected whole pools of {self.pool} in topk={self.topk}, and a tail of pools alone"


_POOLS = Numbers({**space.exactly(1, 4), "other": ((8,), range(2, 2**11))})
_LONGEST_OTHER = 64
_MOST_LOGITS = 2**24
_LOOSE = 100  # factor of the columns where maxima are loose, so that a small case has them


def _shapes(row: Row, draw: Draw = PLAIN) -> Iterator[tuple[int, int]]:
    least = max(batches.query_tokens(row["queries"], draw)[0]) + 2
    for longest in batches.lengths(row["longest"], row["tile"], least, draw=draw):
        for topk in (longest,) if row["keys"] == "as many" else draw.some(COLUMNS, row["columns"], longest):
            classes, pool = (COLUMNS.class_of(topk), against(longest, topk)), draw.of(_POOLS, row["pool"], "pool")
            if classes == (row["columns"], row["keys"]) and topk % pool == 0:
                yield longest, topk


_SHAPED = ("queries", "longest", "tile", "columns", "keys", "pool")


def _few(requests: str, queries: str, others: str, longest: str, starts: str, maxima: str) -> bool:
    number, tokens = batches.REQUESTS.first(requests), max(batches.query_tokens(queries, PLAIN)[0])
    least = batches.LONGEST.least(longest)
    beside = least if others == "equal" else _LONGEST_OTHER
    width = least + (number - 1) * beside if starts == "own" else least
    return number * tokens * width * (_LOOSE if maxima == "loose" else 1) <= _MOST_LOGITS


def _fields(row: Row, draw: Draw) -> grammar.Fields:
    longest, topk = first(_shapes(row, draw))
    number = draw.of(batches.REQUESTS, row["requests"])
    q = tuple(islice(cycle(batches.query_tokens(row["queries"], draw)[0]), number))
    if row["others"] == "equal":
        kv = [longest - new + 1 for new in q]
    elif draw:
        kv = batches.contexts_of(row["others"], number, longest - max(q), draw)
    elif row["others"] == "no context":
        kv = [0] * number
    else:
        kv = [min(batches.short(request), longest - new) for request, new in enumerate(q)]
    place = draw.below(number, "longest") if draw else number // 2
    kv[place] = longest - q[place] + 1
    return {"call": Call.SELECT, "q": q, "kv": tuple(kv), "topk": topk}


TOPK = space.Space(
    role=Role.TOPK,
    capability="select_combinations",
    dimensions=(
        values("dtype", "dtype", "fp32", "bf16", "fp16"),
        values("data", "data", *LOGITS),
        plain("starts", {"column 0": {"packed": False}, "own": {"packed": True}}),
        numbers("pool", "pool", _POOLS),
        plain(
            "tail",
            {"left": {"tail": False}, "taken": {"tail": True}},
            Only("pool", ("4", "other"), "columns are tokens"),
        ),
        measured("queries", batches.ROW_QUERIES, lambda case: batches.query_class(case.q)),
        batches.NUMBER,
        measured("others", batches.OTHERS, lambda case: batches.others_class(case, case.spans)),
        by_length("longest", batches.LONGEST, batches.totals, of=lambda case, total: total - 1),
        by_length("tile", batches.TILE, batches.totals, of=lambda case, total: total - 1),
        counted("columns", COLUMNS, lambda case: case.topk),
        by_length("keys", KEYS, batches.totals, of=lambda case, total: (total - 1, case.topk)),
        LAYOUT,
        *AROUND,
        MAXIMA,
    ),
    rules=(
        *batches.LONE_RULES,
        batches.IN_BOTH,
        Rule(
            "no such length, or no such number of columns",
            _SHAPED,
            lambda *labels: next(_shapes(dict(zip(_SHAPED, labels, strict=True))), None) is not None,
        ),
        rule(f"more than {_MOST_LOGITS:,} logits", _few),
    ),
    shape=_fields,
    small={
        "requests": batches.FEW_REQUESTS,
        "queries": ("1", "2", batches.MIXED),
        "others": ("shorter", "alone", "no context"),
        "longest": ("65 to 256", "1 to 16", "17 to 64", "257 to 1,024"),
        "maxima": ("true",),
    },
    grids=(("requests", "columns"),),
)
