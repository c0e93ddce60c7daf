"""Cases of a compressor: groups of tokens that calls begin, continue and complete."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CacheOperation
from mla_conformance.cases.case import Call, at_least, one_of
from mla_conformance.cases.grammar import CaseError

VALUES = ("normal", "peaked", "large_scores", "tiny_values", "zeros")
"""What key states and scores are like; ``problem.py`` says what each reveals."""
_USUAL_PAGE = 64
_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class CompressCase(CacheOperation):
    """A question to a compressor: the ``kv`` tokens of each request in one call, then its ``q`` in one or several.

    An entry has P + R columns of ``dims``, of which R are rotated; a page holds entries.

    Attributes:
        data: what key states and scores are like.
        ratio: tokens of an entry.
        overlap: whether groups take the one before as well.
        norm: whether entries are normalised.
        inputs: dtype of key states and scores.
        state_page: tokens of a page of states.
        chunk: new tokens in a call; 0 for all.
    """

    role: ClassVar[Role] = Role.COMPRESS
    calls: ClassVar[tuple[Call, ...]] = (Call.COMPRESS,)

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    data: str = one_of(VALUES, "normal")
    ratio: int = at_least(2, 4)
    overlap: bool = False
    norm: bool = True
    inputs: str = one_of(("float32", "model"), "float32")
    state_page: int = at_least(1, 4)
    chunk: int = at_least(0, 0)

    @property
    def head_dim(self) -> int:
        """D, columns of an entry."""
        return self.dimensions.qk_head_dim

    @property
    def rope_dim(self) -> int:
        """R, columns that are rotated."""
        return self.dimensions.qk_rope_head_dim

    @property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return tuple(q + kv for q, kv in zip(self.q, self.kv, strict=True))

    def steps(self) -> Iterator[dict[int, range]]:
        """The tokens of each request that has some, call by call."""
        before = {request: range(kv) for request, kv in enumerate(self.kv) if kv}
        yield from [before] if before else []
        size = self.chunk or max(self.q)
        for start in range(0, max(self.q), max(1, size)):
            yield {
                request: range(kv + start, kv + min(q, start + size))
                for request, (q, kv) in enumerate(zip(self.q, self.kv, strict=True))
                if q > start
            }

    @property
    def row_elements(self) -> int:
        """Columns of a token's states, each drawn, stored, read and judged in float64."""
        return _STEPS * self.head_dim * (2 if self.overlap else 1)

    @property
    def output_elements(self) -> int:
        """Those of an entry."""
        return self.head_dim

    @property
    def key_elements(self) -> int:
        """The same for the tokens before."""
        return self.row_elements

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond normalised entries of 4 tokens in pages of 64, each group by itself."""
        return (
            self.dtype if self.dtype != "bf16" else "",
            f"inputs_{self.inputs}" if self.inputs != "float32" else "",
            f"ratio_{self.ratio}",
            "overlap" if self.overlap else "",
            "" if self.norm else "unnormed",
            f"head_dim_{self.head_dim}" if self.head_dim != 128 else "",
            f"page_{self.page}" if self.page != _USUAL_PAGE else "",
            f"state_page_{self.state_page}" if self.state_page != 4 else "",
        )

    def validate(self) -> None:
        """Hold every field against what it may be, and against the other fields.

        Raises:
            CaseError: a value that it may not have, or that another field contradicts.
        """
        super().validate()
        if self.cache != "auto" or self.ranks > 1:
            raise CaseError(f"compress expects cache=auto on one rank, got {self.cache} on {self.ranks}")
        if not any(self.totals):
            raise CaseError("compress expects a token, got q and kv of 0")
