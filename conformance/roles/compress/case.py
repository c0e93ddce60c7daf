"""Cases of a compressor, whose calls begin, continue and complete groups, and what varies in them. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, cached, grammar
from mla_conformance.cases.case import Call, Case, Sizes, at_least, given, one_of
from mla_conformance.cases.classes import PLAIN, Draw, Numbers, first
from mla_conformance.cases.dimensions import AROUND, DTYPE, ROW_LAYOUT, numbers, spare_blocks, storage
from mla_conformance.cases.space import Dimension, Row, Space, exactly, measured, never, plain, rule, values

VALUES = ("normal", "peaked", "large_scores", "tiny_values", "zeros")
"""What key states and scores are like; ``problem.py`` says what each reveals."""
_STEPS = 2  # each column of a token's states is drawn and stored, and read and judged in float64


@dataclass(frozen=True, kw_only=True)
class CompressCase(cached.CacheOperation):
    """``kv`` tokens of each request in one call, then ``q`` in several; entries of P + R columns, R of them rotated."""

    role: ClassVar[Role] = Role.COMPRESS
    calls: ClassVar[tuple[Call, ...]] = (Call.COMPRESS,)
    asked: ClassVar = {
        **{"dtype": "{}", "inputs": "inputs_{}", "ratio": (None, "ratio_{}"), "overlap": "overlap", "norm": "unnormed"},
        **{"head_dim": (128, "head_dim_{}"), "page": "page_{}", "state_page": "state_page_{}"},
    }
    asks = Case.asks

    dtype: str = one_of(("bf16", "fp16", "fp32"), "bf16")
    dims: str = "64-64-128-128"
    data: str = one_of(VALUES, "normal", "what key states and scores are like", joined=True)
    ratio: int = at_least(2, 4, "tokens of an entry")
    overlap: bool = given(False, "whether groups take the one before as well")
    norm: bool = given(True, "whether entries are normalised")
    inputs: str = one_of(("float32", "model"), "float32", "dtype of key states and scores")
    state_page: int = at_least(1, 4, "tokens of a page of states")
    chunk: int = at_least(0, 0, "new tokens in a call; 0 for all")
    moved: bool = given(False, "whether the requests of each call stand one row further than those of the last")

    @property
    def columns(self) -> int:
        return self.head_dim * (2 if self.overlap else 1)

    @property
    def block_elements(self) -> int:  # with its states'
        return super().block_elements + 2 * self.state_page * self.columns

    def steps(self) -> Iterator[dict[int, range]]:
        """The tokens of each request that has some, call by call, in the order of its rows."""
        before = {request: range(kv) for request, kv in enumerate(self.kv) if kv}
        steps, size = [before] if before else [], self.chunk or max(self.q)
        for start in range(0, max(self.q), max(1, size)):
            new = {
                request: range(kv + start, kv + min(q, start + size))
                for request, (q, kv) in enumerate(zip(self.q, self.kv, strict=True))
                if q > start
            }
            steps.append(new)
        for number, step in enumerate(steps):
            rows, further = list(step.items()), number % len(step) if self.moved else 0
            yield dict(rows[-further:] + rows[:-further] if further else rows)

    @property
    def sizes(self) -> Sizes:
        states = _STEPS * self.columns
        return super().sizes._replace(row=states, output=self.head_dim, key=states)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.cache != "auto" or self.ranks > 1:
            yield f"compress expects cache=auto on one rank, got {self.cache} on {self.ranks}"
        if not any(self.totals):
            yield "compress expects a token, got q and kv of 0"
        if not self.spare and max(self.totals) < self.ratio:
            yield f"field spare: expected a block, since no request has the {self.ratio} tokens of an entry, got 0"


_RATIOS = Numbers({**exactly(4, 128, 2, 3), "other": ((8,), range(5, 128))})
_RESIDUES = ("0", "1", "all but one", "between")
_NEW = ("several groups", "one token", "a group at most", "none")
_CHUNKS = ("at once", "one by one", "part of a group", "more")
_FEW = 4
_MOST_STATES = 2**22
_POSITIONS = Numbers(
    {
        "up to 4,096": (range(1, 4097),),
        "> 2^12": (range(4097, 2**15 + 1),),
        "> 2^15": (range(2**15 + 1, 2**17 + 1),),
    }
)
_FAR = ("> 2^12", "> 2^15")
_MOST_BEFORE, _MOST_OTHER = 2**12, 300
"""Tokens before the new ones of the first request, and of another, where they are drawn."""


def _residue(tokens: int, ratio: int) -> str:
    rest = tokens % ratio
    return str(rest) if rest < 2 else "all but one" if rest == ratio - 1 else "between"


def _before(case: CompressCase, request: int) -> str:
    return _residue(case.kv[request], case.ratio) if case.kv[request] else "nothing"


def _new(q: int, ratio: int) -> str:
    return {0: "none", 1: "one token"}.get(q) or ("a group at most" if q <= ratio else "several groups")


def _of_first(name: str, labels: tuple[str, ...], of: Callable[..., str | None]) -> Dimension:
    return measured(name, labels, lambda case: of(case, 0), of_request=of)


def _chunks(case: CompressCase) -> str:
    if not case.chunk:
        return "at once"
    return "one by one" if case.chunk == 1 else "part of a group" if case.chunk < case.ratio else "more"


def _tokens(
    ratio: str, before: str, end: str, new: str, positions: str, draw: Draw = PLAIN
) -> Iterator[tuple[int, int]]:
    size = draw.of(_RATIOS, ratio, "ratio")
    far = _POSITIONS.least(positions) // size  # groups behind which these positions begin, about
    groups = (*(draw.near(1, max(far, _MOST_BEFORE // size), n) for n in range(2)),) if draw else (2, 1, 3, 0)
    starts = [0] if before == "nothing" else [(far + n) * size + rest for n in groups for rest in range(size)]
    for kv in starts:
        if before != "nothing" and (not kv or _residue(kv, size) != before):
            continue
        more = size * draw.near(1, _MOST_BEFORE // size, "new") if draw and new == "several groups" else 0
        more += 0 if kv else far * size
        for q in range(more, more + 3 * size + 1):
            asked = (new, end, positions)
            if q + kv and (_new(q, size), _residue(q + kv, size), _POSITIONS.class_of(q + kv)) == asked:
                yield q, kv
                break


def _fields(row: Row, draw: Draw) -> grammar.Fields:
    ratio, page = draw.of(_RATIOS, row["ratio"], "ratio"), draw.of(batches.PAGES, row["page"])
    q, kv = first(_tokens(row["ratio"], row["before"], row["end"], row["new"], row["positions"], draw))
    number = draw.of(batches.REQUESTS, row["requests"])
    others = ((1, ratio - 1), (_FEW + 1, 0), (2, 2 * ratio), (0, ratio + 1), (_FEW, ratio - 2))
    further = ((draw.below(3 * ratio, "new", n), draw.near(1, _MOST_OTHER, n)) for n in range(2 if draw else 0))
    rest = islice(cycle((*others, *further)), number - 1)
    new, before = zip((q, kv), *rest, strict=True)
    part = draw.near(2, ratio - 1, "chunk") if draw and ratio > 2 else ratio - 1
    chunks = {"at once": 0, "one by one": 1, "part of a group": part, "more": ratio + draw.near(1, ratio, "more")}
    fields = {"q": new, "kv": before, "page": page, "chunk": chunks[row["chunks"]], **spare_blocks(row, page, draw)}
    return {"call": Call.COMPRESS, **fields}


COMPRESS = Space(
    role=Role.COMPRESS,
    capability="compress_combinations",
    dimensions=(
        DTYPE,
        values("inputs", "inputs", "float32", "model"),
        values("data", "data", *VALUES),
        values("dims", "dims", "64-64-128-128", "448-64-512-512", "128-0-128-128", "8-8-16-16"),
        numbers("ratio", "ratio", _RATIOS),
        plain("overlap", {"none": {"overlap": False}, "with the group before": {"overlap": True}}),
        plain("norm", {"normalised": {"norm": True}, "as they are": {"norm": False}}),
        batches.NUMBER,
        _of_first("before", ("nothing", *_RESIDUES), _before),
        _of_first("end", _RESIDUES, lambda case, n: _residue(case.q[n] + case.kv[n], case.ratio)),
        _of_first("new", _NEW, lambda case, n: _new(case.q[n], case.ratio)),
        _of_first("positions", (*_POSITIONS.parts,), lambda case, n: _POSITIONS.class_of(case.totals[n])),
        measured("chunks", _CHUNKS, _chunks),
        batches.pages()[0],
        numbers("state page", "state_page", Numbers({**exactly(4, 8, 1), "other": ((3, 16, 64), range(2, 257))})),
        ROW_LAYOUT,
        *storage(),
        *AROUND,
    ),
    rules=(
        rule(
            "no such tokens leave so much of a group",
            lambda ratio, before, end, new, positions: any(_tokens(ratio, before, end, new, positions)),
        ),
        never("prompts as long are in no chunks", {"before": ("nothing",), "positions": _FAR, "chunks": _CHUNKS[1:]}),
        never("groups of two have no such part", {"ratio": ("2",), "chunks": ("part of a group",)}),
        never("nothing new is in no chunks", {"new": ("none",), "chunks": _CHUNKS[1:], "requests": ("1",)}),
        never(
            "groups of 128 are not gone through token by token",
            {"ratio": ("128",), "chunks": ("one by one",), "new": ("several groups", "a group at most")},
        ),
        rule(
            f"more than {_MOST_STATES:,} numbers in states",
            lambda requests, ratio: batches.REQUESTS.first(requests) * _RATIOS.first(ratio) <= _MOST_STATES // 2**9,
        ),
    ),
    shape=_fields,
    small={
        "dims": ("8-8-16-16",),
        "requests": batches.FEW_REQUESTS,
        "ratio": ("4", "2", "3", "other"),
        "unused": ("few",),
        "positions": ("up to 4,096",),
    },
)
