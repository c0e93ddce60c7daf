"""Cases of a top-k: rows of given logits, each with a window of columns, and the best of them selected."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, Kind, Sizes, at_least, given, one_of, some_of

LOGITS = (
    *("normal", "integers", "ones", "last_bits", "relu", "zeros", "negative", "rising", "falling", "outliers"),
    *("beyond_half", "subnormal", "infinite", "masked", "nan"),
)
"""What logits are like; ``problem.py`` says what each reveals."""
TIED = ("zeros", "subnormal")
"""Those of which some are equal and differ in their bits, so that a kernel's own order of ties is not theirs."""
_USUAL = 64
_STEPS = 4
"""Each logit is ordered, selected and judged in float64."""


@dataclass(frozen=True, kw_only=True)
class TopKCase(Case):
    """A question to a top-k: the first row of each request sees ``kv`` columns, and each further one column more.

    ``layout`` is that of the rows of logits, ``inflate`` the factor of the columns over those that any row sees.
    """

    role: ClassVar[Role] = Role.TOPK
    calls: ClassVar[tuple[Call, ...]] = (Call.SELECT,)
    longer: ClassVar[Mapping[str, int]] = {"kv": 13}
    # Beyond 64 columns of rows that start at column 0.
    asked: ClassVar = {
        "packed": (False, "row_starts"),
        "dtype": ("fp32", "{}"),
        "topk": (_USUAL, "topk_{}"),
        "pool": (1, "pool_{}"),
    }

    dtype: str = one_of(("fp32", "bf16", "fp16"), "fp32")
    dims: str = "small"
    heads: int = at_least(1, 1)
    data: str = some_of(LOGITS, "normal", "what the logits are like")
    topk: int = at_least(1, _USUAL, "columns selected for each row, or their tokens")
    packed: bool = given(
        False,
        "whether the columns of the requests stand behind one another, so that rows start at those of their own",
    )
    pool: int = at_least(1, 1, "tokens of a column", Kind.SIZE)
    tail: bool = given(False, "whether the last, incomplete pool is selected besides")

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that each row sees, request by request; one a column where columns are no pools."""
        return tuple(kv + row for q, kv in zip(self.q, self.kv, strict=True) for row in range(q))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Columns that each row sees: of a pool it sees all tokens or none."""
        return tuple(tokens // self.pool for tokens in self.tokens)

    @property
    def spans(self) -> tuple[int, ...]:
        """Columns that the last row of each request sees."""
        return tuple((kv + max(0, q - 1)) // self.pool for q, kv in zip(self.q, self.kv, strict=True))

    @property
    def places(self) -> int:
        """Numbers that are returned for a row."""
        return self.topk + (self.pool - 1 if self.tail else 0)

    @property
    def width(self) -> int:
        """Columns of the logits."""
        return max(1, sum(self.spans) if self.packed else max(self.spans)) * self.inflate

    @property
    def sizes(self) -> Sizes:
        return Sizes(columns=1, row=_STEPS * self.width, output=max(self.spans) + self.topk, key=0)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if min(self.q) < 1:
            yield f"{self.call} expects at least one row a request, got q={list(self.q)}"
        if self.topk % self.pool or (self.tail and self.pool == 1):
            yield f"expected whole pools of {self.pool} in topk={self.topk}, and a tail of pools alone"
