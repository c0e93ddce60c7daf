"""Cases of a preparation: index queries, keys and weights behind their projections, to codes and scales."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, at_least, one_of
from mla_conformance.cases.grammar import CaseError
from mla_conformance.reference.entry_formats import TILE_SCALES

VALUES = ("normal", "outliers", "integers", "shifted", "tiny_values", "zeros")
"""What queries and keys are like; ``problem.py`` says what each reveals."""
PAIRS = ("halves", "neighbours")
BLOCK = 128
"""Columns that share a scale."""
_USUAL_HEADS = 64
_LONGER = 13


@dataclass(frozen=True, kw_only=True)
class PrepareCase(Case):
    """A question to a preparation: ``q`` tokens of each request, behind ``kv`` others.

    A head has P + R columns of ``dims``.

    Attributes:
        data: what queries and keys are like.
        pairs: what is rotated together, columns R/2 apart or neighbours.
        rope_last: whether the last R columns are rotated, not the first.
        hadamard: whether queries and keys pass through the Hadamard transform.
        scales: of the codes, any float32 numbers or powers of two.
        fold: whether the weights take the scales of the queries, the softmax scale and heads^-1/2; else the scales are
            returned.
        fused: whether keys and weights, of the model's dtype, are columns of one projection.
        eps: of the keys' norm, in millionths.
        layout: of the queries.
    """

    role: ClassVar[Role] = Role.PREPARE
    calls: ClassVar[tuple[Call, ...]] = (Call.PREPARE_INDEX,)

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    heads: int = at_least(1, _USUAL_HEADS)
    data: str = one_of(VALUES, "normal")
    pairs: str = one_of(PAIRS, "halves")
    rope_last: bool = False
    hadamard: bool = True
    scales: str = one_of(TILE_SCALES, "float32")
    fold: bool = True
    fused: bool = False
    eps: int = at_least(1, 1)

    @property
    def head_dim(self) -> int:
        """Columns of a query head and of a key."""
        return self.dimensions.qk_head_dim

    @property
    def rope_dim(self) -> int:
        """Columns that are rotated."""
        return self.dimensions.qk_rope_head_dim

    @property
    def norm_eps(self) -> float:
        """What the norm adds to the variance."""
        return self.eps / 1e6

    @property
    def is_causal(self) -> bool:
        """No token meets another."""
        return False

    @property
    def columns(self) -> int:
        """Columns that a head's transform takes."""
        return self.head_dim

    @property
    def visible_lens(self) -> tuple[int, ...]:
        """As many products for each column as there are columns."""
        return (self.head_dim,) * len(self.q)

    @property
    def key_elements(self) -> int:
        """A row of the table of rotations for each position."""
        return self.rope_dim

    @property
    def profile(self) -> str:
        """The entry that is driven."""
        return self.call

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond DeepSeek-V3.2's: the first columns in halves, transformed, with folded weights."""
        return (
            self.dtype if self.dtype != "bf16" else "",
            self.pairs if self.pairs != "halves" else "",
            "rope_last" if self.rope_last else "",
            "" if self.hadamard else "untransformed",
            "pow2" if self.scales == "pow2" else "",
            "" if self.fold else "unfolded",
            f"heads_{self.heads}" if self.heads != _USUAL_HEADS else "",
            f"head_dim_{self.head_dim}" if self.head_dim != BLOCK else "",
        )

    def varied(self) -> Self:
        """Later tokens in reverse order, with other values."""
        return replace(self, kv=tuple(length + _LONGER for length in reversed(self.kv)), seed=self.seed + 1)

    def validate(self) -> None:
        """Hold every field against what it may be, and against the other fields.

        Raises:
            CaseError: a value that it may not have, or that another field contradicts.
        """
        super().validate()
        width, rope = self.head_dim, self.rope_dim
        if min(self.q) < 1:
            raise CaseError(f"{self.call} expects at least one token a request, got q={list(self.q)}")
        if rope % 2 or not rope or (width > BLOCK and width % BLOCK):
            raise CaseError(f"expected pairs to rotate and whole blocks of {BLOCK} columns, got dims={self.dims}")
        if self.hadamard and width & (width - 1):
            raise CaseError(f"a Hadamard transform takes a power of two columns, got dims={self.dims}")
        if self.fold and width > BLOCK:
            raise CaseError(f"weights take one scale of a query, so fold=1 has up to {BLOCK} columns, got {width}")
