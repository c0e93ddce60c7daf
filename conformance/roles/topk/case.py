"""Cases of a top-k: rows of given logits, each with a window of columns, and the best of them selected."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, at_least, one_of
from mla_conformance.cases.grammar import CaseError

LOGITS = (
    "normal",
    "integers",
    "ones",
    "last_bits",
    "relu",
    "zeros",
    "negative",
    "rising",
    "falling",
    "outliers",
    "beyond_half",
    "subnormal",
    "infinite",
    "masked",
    "nan",
)
"""What logits are like; ``problem.py`` says what each reveals."""
TIED = ("zeros", "subnormal")
"""Those of which some are equal and differ in their bits, so that a kernel's own order of ties is not theirs."""
_USUAL = 64
_LONGER = 13
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class TopKCase(Case):
    """A question to a top-k: the first row of each request sees ``kv`` columns, and each further one column more.

    Attributes:
        data: what the logits are like.
        topk: columns selected for each row, or their tokens.
        packed: whether the columns of the requests stand behind one another, so that rows start at those of their own.
        pool: tokens of a column.
        tail: whether the last, incomplete pool is selected besides.
        layout: of the rows of logits, as of queries.
        inflate: factor of the columns that there are over those that any row sees.
    """

    role: ClassVar[Role] = Role.TOPK
    calls: ClassVar[tuple[Call, ...]] = (Call.SELECT,)

    dtype: str = one_of(("fp32", "bf16", "fp16"), "fp32")
    dims: str = "small"
    heads: int = at_least(1, 1)
    data: str = one_of(LOGITS, "normal")
    topk: int = at_least(1, _USUAL)
    packed: bool = False
    pool: int = at_least(1, 1)
    tail: bool = False

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
    def columns(self) -> int:
        """A logit is compared as one column of a key is multiplied."""
        return 1

    @property
    def row_elements(self) -> int:
        """Logits of a row, each of which is ordered, selected and judged in float64."""
        return _STEPS * self.width

    @property
    def output_elements(self) -> int:
        """The judge looks at every logit of a row, and at each number."""
        return max(self.spans) + self.topk

    @property
    def key_elements(self) -> int:
        """There are no keys."""
        return 0

    @property
    def profile(self) -> str:
        """The entry that is driven."""
        return self.call

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond 64 columns of rows that start at column 0."""
        starts = "row_starts" if self.packed else ""
        return (
            starts,
            self.dtype if self.dtype != "fp32" else "",
            f"topk_{self.topk}" if self.topk != _USUAL else "",
            f"pool_{self.pool}" if self.pool > 1 else "",
        )

    def varied(self) -> Self:
        """Longer rows in reverse order, with other logits."""
        return replace(self, kv=tuple(length + _LONGER for length in reversed(self.kv)), seed=self.seed + 1)

    def validate(self) -> None:
        """Hold every field against what it may be; each request has a row.

        Raises:
            CaseError: a value that it may not have.
        """
        super().validate()
        if min(self.q) < 1:
            raise CaseError(f"{self.call} expects at least one row a request, got q={list(self.q)}")
        if self.topk % self.pool or (self.tail and self.pool == 1):
            raise CaseError(f"expected whole pools of {self.pool} in topk={self.topk}, and a tail of pools alone")
