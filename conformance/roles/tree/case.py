"""Cases of trees of drafts that a decode verifies, and what varies in them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, dimensions, space
from mla_conformance.cases.case import Call, given, one_of
from mla_conformance.roles.decode.case import DECODE, DecodeCase

TREES = ("random", "chain", "binary", "star")
_MOST_TOKENS = 2**12  # query tokens of a request, whose mask has the square of it


@dataclass(frozen=True, kw_only=True)
class TreeCase(DecodeCase):
    role: ClassVar[Role] = Role.TREE
    calls: ClassVar[tuple[Call, ...]] = (Call.TREE_DECODE,)

    tree: str = one_of(
        (*TREES, "deep"),
        "random",
        "what the query tokens of a request are; requests have several, joined by +, in turn",
        joined=True,
    )
    parents: tuple[int, ...] = given(
        (),
        "in place of such trees the parent of each query token: its number in its request, below the token's own; "
        "that of a request's first token, which has none, is 0",
    )

    def tree_of(self, request: int) -> str:
        trees = self.tree.split("+")
        return trees[request % len(trees)]

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.ranks > 1:
            yield f"{self.call} expects one rank, got {self.ranks}"
        if max(self.q) > _MOST_TOKENS:
            yield f"{self.call} expects at most {_MOST_TOKENS:,} query tokens a request, got {max(self.q):,}"
        if self.parents and len(self.parents) != sum(self.q):
            yield f"field parents: expected one for each of {sum(self.q)} query tokens, got {len(self.parents)}"
        tokens = ((request, number) for request, new in enumerate(self.q) for number in range(new))
        for (request, number), parent in zip(tokens, self.parents, strict=False):
            if not 0 <= parent <= max(0, number - 1):
                before = f"0 to {number - 1}" if number else "0"
                yield f"field parents: expected {before} of token {number} of request {request}, got {parent}"


_LEFT_OUT = {"tile scales", "ranks", "interleave"}  # dimensions of decodes
_SOME = {  # classes of other ones
    "cache": ("auto", "fp8", "fp8_ds_mla"),
    "heads": ("16", "128", "1", "odd", "8", "even"),
    "queries": ("5 to 8", "9 to 16", batches.MIXED, "1", "2"),
    "requests": ("2 to 7", "1", "8 to 63", "64 to 299"),
    "longest": ("65 to 256", "1 to 16", "17 to 64", "257 to 1,024", "> 2^10", "> 2^12", "> 2^15"),
    "tile": ("between", "0 of 64", "1 of 64", "-1 of 64"),
    "page": ("64", "16", "1", "128"),
    "data": ("needle", "normal", "negative", "ones", "large_logits", "rising"),
}
TREE = space.Space(
    role=Role.TREE,
    capability="tree_combinations",
    dimensions=(
        space.Dimension(
            "tree",
            {tree: {"tree": tree} for tree in TREES},
            lambda case: None if case.parents else case.tree_of(case.leading[0]),
            of_request=lambda case, request: None if case.parents else case.tree_of(request),
        ),
        *(
            replace(each, classes={label: each.classes[label] for label in _SOME.get(each.name, each.classes)})
            for each in DECODE.dimensions
            if each.name not in _LEFT_OUT
        ),
    ),
    rules=tuple(rule for rule in DECODE.rules if not _LEFT_OUT.intersection(rule.over)),
    shape=partial(dimensions.paged_batch, Call.TREE_DECODE),
    small={**batches.SMALL_BATCHES, "dims": ("small",)},
    grids=(("queries", "tree"), ("page",)),
)
