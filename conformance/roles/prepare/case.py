"""Cases of a preparation: index queries, keys and weights behind their projections, to codes and scales."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, Kind, Sizes, at_least, given, one_of, some_of
from mla_conformance.reference.entry_formats import TILE_SCALES

VALUES = ("normal", "outliers", "integers", "shifted", "tiny_values", "zeros")
"""What queries and keys are like; ``problem.py`` says what each reveals."""
PAIRS = ("halves", "neighbours")
BLOCK = 128
"""Columns that share a scale."""
_USUAL_HEADS = 64


@dataclass(frozen=True, kw_only=True)
class PrepareCase(Case):
    """A question to a preparation: ``q`` tokens of each request, behind ``kv`` others.

    A head has P + R columns of ``dims``.

    ``layout`` is that of the queries.
    """

    role: ClassVar[Role] = Role.PREPARE
    calls: ClassVar[tuple[Call, ...]] = (Call.PREPARE_INDEX,)
    longer: ClassVar[Mapping[str, int]] = {"kv": 13}
    # Beyond DeepSeek-V3.2's: the first columns in halves, transformed, with folded weights.
    asked: ClassVar = {
        "dtype": ("bf16", "{}"),
        "pairs": ("halves", "{}"),
        "rope_last": (False, "rope_last"),
        "hadamard": (True, "untransformed"),
        "scales": ("float32", "{}"),
        "fold": (True, "unfolded"),
        "heads": (_USUAL_HEADS, "heads_{}"),
        "head_dim": (BLOCK, "head_dim_{}"),
    }

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    heads: int = at_least(1, _USUAL_HEADS)
    data: str = some_of(VALUES, "normal", "what queries and keys are like")
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
    eps: int = at_least(1, 1, "of the keys' norm, in millionths", Kind.SCALE)

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
        return False  # no token meets another

    @property
    def visible_lens(self) -> tuple[int, ...]:
        """As many products for each column as there are columns."""
        return (self.head_dim,) * len(self.q)

    @property
    def sizes(self) -> Sizes:
        """A key is a row of the table of rotations."""
        columns = self.head_dim
        return super().sizes._replace(columns=columns, row=self.heads * columns, key=self.rope_dim)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        width, rope = self.head_dim, self.rope_dim
        if min(self.q) < 1:
            yield f"{self.call} expects at least one token a request, got q={list(self.q)}"
        if rope % 2 or not rope or (width > BLOCK and width % BLOCK):
            yield f"expected pairs to rotate and whole blocks of {BLOCK} columns, got dims={self.dims}"
        if self.hadamard and width & (width - 1):
            yield f"a Hadamard transform takes a power of two columns, got dims={self.dims}"
        if self.fold and width > BLOCK:
            yield f"weights take one scale of a query, so fold=1 has up to {BLOCK} columns, got {width}"
