"""Cases of a compressor: groups of tokens that calls begin, continue and complete."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CacheOperation
from mla_conformance.cases.case import Call, Kind, Sizes, at_least, given, one_of, some_of

VALUES = ("normal", "peaked", "large_scores", "tiny_values", "zeros")
"""What key states and scores are like; ``problem.py`` says what each reveals."""
_USUAL_PAGE = 64
_STEPS = 8
"""Each column of a token's states is drawn, stored, read and judged in float64."""


@dataclass(frozen=True, kw_only=True)
class CompressCase(CacheOperation):
    """A question to a compressor: the ``kv`` tokens of each request in one call, then its ``q`` in one or several.

    An entry has P + R columns of ``dims``, of which R are rotated; a page holds entries.
    """

    role: ClassVar[Role] = Role.COMPRESS
    calls: ClassVar[tuple[Call, ...]] = (Call.COMPRESS,)

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    data: str = some_of(VALUES, "normal", "what key states and scores are like")
    ratio: int = at_least(2, 4, "tokens of an entry", Kind.SIZE)
    overlap: bool = given(False, "whether groups take the one before as well")
    norm: bool = given(True, "whether entries are normalised")
    inputs: str = one_of(("float32", "model"), "float32", "dtype of key states and scores", Kind.DTYPE)
    state_page: int = at_least(1, 4, "tokens of a page of states", Kind.SIZE)
    chunk: int = at_least(0, 0, "new tokens in a call; 0 for all", Kind.SIZE)

    @property
    def head_dim(self) -> int:
        """D, columns of an entry."""
        return self.dimensions.qk_head_dim

    @property
    def rope_dim(self) -> int:
        """R, columns that are rotated."""
        return self.dimensions.qk_rope_head_dim

    @property
    def columns(self) -> int:
        """C · D, columns of a token's key state and of its scores."""
        return self.head_dim * (2 if self.overlap else 1)

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
    def sizes(self) -> Sizes:
        states = _STEPS * self.columns
        return super().sizes._replace(row=states, output=self.head_dim, key=states)

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

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.cache != "auto" or self.ranks > 1:
            yield f"compress expects cache=auto on one rank, got {self.cache} on {self.ranks}"
        if not any(self.totals):
            yield "compress expects a token, got q and kv of 0"
