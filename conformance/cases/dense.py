"""Dense batches, of tens of requests whose lengths and query tokens are their own, and long requests. No torch.

They are drawn by hash, until a CPU is asked for one. Arrays are found with them before them, and some are fitted to
each kernel.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases import grammar, work
from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.space import Preference, Space

Classes = Mapping[str, Sequence[str]]  # of each dimension, those that are wanted
_BATCHES, _TRIES = 24, 80  # dense batches of a role, and how often one is drawn until a CPU is asked for it
_REQUESTS = (33, 34, 40, 48, 63, 64, 65, 66, 72, 96, 97, 100, 127, 128, 129, 130)
_EDGES = (0, 0, 1, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 191, 192, 255, 256, 257)
# Positions, where the context of a request is nothing but one.
_FAR = (255, 256, 257, 2047, 2048, 2049, 32_767, 32_768, 40_000, 65_535, 65_536, 70_000)
_LONG = (513, 1100, 1537, 2049, 4200, 9000, 17_000, 33_000, 70_000)
_ROWS = (257, 513, 640, 1100, 2049, 4200)
_BLOCKS = (255, 2049, 32_768, 33_000, 65_536, 66_000)  # that no request holds, among which those of the requests lie
_SLOTS = (2**15 + 100, 2**16 + 100, 2**17 + 100, 2**18, 2**20)
_SHARED = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 16))  # layers that share a buffer of so many blocks; tokens of a page
_REGIMES = (1, 2, 5, 9, 16)  # how many data regimes requests have in turn
_POSITIONS, _SMALL = "positions", "small"
_OF_ANY_NEW = (Role.PREFILL, Role.CACHE, Role.COMPRESS)  # roles whose requests have any number of new tokens, or none
PLANNED = (Call.CHUNKED_CONTEXT, Call.LAYER)


def dense_cases(space: Space) -> list[Case]:
    """The dense batches and long requests of a role that a CPU is asked for and that are in classes of the space."""
    found = [next(_drawn(space, f"dense {number}", _dense), None) for number in range(_BATCHES)]
    for name, numbers in (("keys", _LONG), ("rows", _ROWS)):
        found += [next(_drawn(space, f"{name} {number}", _long, number), None) for number in numbers]
    return list(dict.fromkeys(filter(None, found)))


def drawn_case(space: Space, name: str, classes: Classes) -> Case | None:
    """A dense batch or a long request of some classes, with any heads, which are drawn by this name."""
    kinds = (_dense, _dense, _wide, _wide, *(partial(_long, length=length, any_heads=True) for length in _LONG))
    kind = Draw(name).pick(kinds, "kind")
    what = _SMALL if kind is _wide else "rows" if Draw(name).below(2, "rows") else "keys"
    return next(_drawn(space, f"{what} {name}", kind, classes=classes, tries=4), None)


def _drawn(
    space: Space, name: str, changed: Any, *arguments: int, classes: Classes | None = None, tries: int = _TRIES
) -> Iterator[Case]:
    for attempt in range(tries):
        draw = Draw(f"{space.capability}|{name}|{attempt}")
        row = space.completed((), _preferred(space, draw, classes, name.startswith(_SMALL)))
        assert row
        with suppress(CaseError):
            case = space.case_of(row, draw)
            case = replace(case, **changed(space, case, draw, name.startswith("rows"), *arguments))
            if space.regimes and len(case.q) > 1:
                many = draw.pick(_REGIMES, "regimes")
                case = replace(case, data="+".join(draw.pick(space.regimes, "regime", n) for n in range(many)))
            if work.is_light(case) and not space.outside(case):
                yield case


def _preferred(space: Space, draw: Draw, classes: Classes | None, small: bool) -> Preference:
    """Those of small batches mostly first, where these are named; of sizes of heads the smallest ones if ``small``."""

    @cache
    def drawn(name: str, labels: Sequence[str]) -> list[str]:
        if small and name == "dims":
            return sorted(classes[name] if classes else labels, key=lambda dims: grammar.dimensions_of(dims)[1])
        usual, known = space.small.get(name, labels), classes[name] if classes else labels
        usual = usual if draw.below(4, "usual", name) else labels
        return sorted(known, key=lambda label: (label not in usual, draw.below(2**32, name, label)))

    return lambda name, labels, row: drawn(name, labels)


def _dense(space: Space, case: Case, draw: Draw, _: bool) -> dict[str, Any]:
    """Tens of requests with lengths of their own: mixed, in runs beyond a warp, or two long ones with short between."""
    trees = case.role is Role.TREE  # few of them with many tokens, since it is trees that differ
    number = draw.pick((2, 2, 3, 4, 5, 9, 17, 33) if trees else _REQUESTS, "requests")
    most = draw.pick((8, 16, 40, 65) if trees else (1, 1, 2, 4, 8, 16), "queries")
    one = case.pad or draw.below(2, "one")
    q = [most if one and not case.pad else 1 if case.pad else 1 + draw.below(most, "new", n) for n in range(number)]
    far = any(each.name == _POSITIONS for each in space.dimensions)
    run = draw.pick((1, 1, 1, 1, 33, 40, 48, number), "runs")
    kv = [draw.pick(_FAR if far and draw.below(2, n // run) else _EDGES, "kv", n // run) for n in range(number)]
    # As long as engines have them, above all where a key is a number.
    if draw.below(2 if case.role is Role.TOPK else 6, "larger") == 0:
        kv = [tokens * draw.pick((2, 8, 16), "times") for tokens in kv]
    elif draw.below(3, "long") == 0:
        first, second = draw.below(number, "first"), draw.below(number, "second")
        kv[first], kv[second] = draw.pick((513, 700, 1100), "longer"), draw.pick((513, 1000, 1025), "longest")
    if case.role is Role.SPARSE_LAYER:  # whose keys are made from hidden states, which takes long
        kv = [tokens % 43 for tokens in kv]
    if draw.below(6, "whole tiles") == 0:  # that all requests fill, with their new tokens
        tile = draw.pick((16, 64, 128), "tile")
        kv = [max(0, -(-(tokens + new) // tile) * tile - new) for tokens, new in zip(kv, q, strict=True)]
    if case.call == Call.NEW_TOKENS or (case.role in _OF_ANY_NEW and draw.below(2, "new")):
        q, kv = kv, q[::-1]
    blocks: dict[str, int] = {}
    if hasattr(case, "spare") and draw.below(6, "ids") == 0:  # as wide as ids are in a buffer that layers share
        layers, page = draw.pick(_SHARED, "shared")
        blocks = {"spare": draw.pick(_BLOCKS, "blocks"), "layers": layers, "page": page}
    return {**_shaped(case, q, kv, draw), **blocks}


def _wide(space: Space, case: Case, draw: Draw, _: bool) -> dict[str, Any]:
    if not hasattr(case, "spare"):
        raise CaseError(f"{case.id}: expected a cache")
    spare = draw.pick(_BLOCKS, "blocks") if draw.below(2, "of blocks") else -(-draw.pick(_SLOTS, "slots") // case.page)
    return {"spare": spare}


def _long(space: Space, case: Case, draw: Draw, rows: bool, length: int, any_heads: bool = False) -> dict[str, Any]:
    number, few = draw.pick((1, 2, 3), "requests"), draw.pick((1, 1, 2, 4, 5, 8), "queries")
    q, kv = [few] * number, [draw.pick(_EDGES, "kv", n) for n in range(number)]
    place = draw.below(number, "longest")
    (q if rows or case.call == Call.NEW_TOKENS or case.role is Role.CACHE else kv)[place] = length
    few_heads = case.heads > 1 and case.role is not Role.COMPRESS and not any_heads
    heads = {"heads": draw.pick((1, 1, 2, 3), "heads")} if few_heads else {}
    return {**_shaped(case, q, kv, draw), **heads}


def _shaped(case: Case, q: list[int], kv: list[int], draw: Draw) -> dict[str, Any]:
    decodes: dict[str, Any] = {}
    if hasattr(case, "decodes"):
        many = len(q) if case.decodes == len(case.q) else 0 if not case.decodes else draw.below(len(q), "decodes")
        drafted = min(q[0], 3)
        longer = [drafted + 1 + draw.below(24, "tokens", n) if new < 24 else new for n, new in enumerate(q)]
        if getattr(case, "order", "") == "decodes_first" or case.role is Role.SPARSE_LAYER:
            q, decodes = [drafted] * many + longer[many:], {"decodes": many}
        else:
            q, decodes = longer[: len(q) - many] + [drafted] * many, {"decodes": many}
    lengths: dict[str, grammar.Lengths] = {"q": tuple(q), "kv": tuple(kv) if case.call != Call.NEW_TOKENS else ()}
    tokens = case.page * len(q) * draw.pick((1, 2, 4, 16), "workspace")  # to a multiple of 8, as builders have them
    return {**lengths, **decodes, **({"workspace": -(-tokens // 8) * 8} if case.call in PLANNED else {})}
