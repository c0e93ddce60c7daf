"""Which cases hold every pair of classes of a space, as ``ci/arrays.py`` found them; what is drawn by hash. No torch.

The arrays are kept, since finding them takes longer than judging some of them. Among what they are found with are dense
batches, of tens of requests whose lengths and query tokens are their own, and long requests, with one head and small
head dims where they can, so that a CPU judges lengths and rows that engines use. The dispatch grid of a role has a tiny
case for each cell by which kernels choose among their instances.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from itertools import chain, combinations, islice
from typing import Any

from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases import grammar
from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.covering import FinePairs, Pair, Pairs, cover, filled
from mla_conformance.cases.space import Preference, Row, Space, held
from mla_conformance.cases.work import CPU_WORK, GPU_WORK, is_light, work_of

_OURS: list[Space] = [
    getattr(import_module(f"mla_conformance.roles.{role}.case"), role.upper()) for role in ROLES.values()
]
SPACES = {space.capability: space for space in _OURS}  # by the capability whose cases their arrays are
KEPT: dict[str, list[str]] = {
    capability: [f"{capability}:{fields}" for fields in array]
    for capability, array in json.loads((files("mla_conformance.fixtures") / "arrays.json").read_text()).items()
}
"""The ids of each array, as they are kept; of that of a role from outside once it is asked for."""
_LIGHT = 2e7  # work of a case of an array that is taken where there is one
_COMPARED = 6  # draws of members of a row that fit a device, of which the best is taken


@cache
def array_of(capability: str) -> tuple[Case, ...]:
    """The cases of a capability's covering array; that of a role from outside is found when it is asked for."""
    if capability not in KEPT:
        KEPT[capability] = [case.id for case in found_array(SPACES[capability], ())[0]]
    return tuple(map(Case.parse, KEPT[capability]))


def digest_of(fitted: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Twelve hexadecimal digits of the arrays, or of those in another list, and of cases fitted beside them."""
    arrays: Mapping[str, list[str]] = KEPT
    if listed is not None:
        arrays = {name: [id for id in listed if id.startswith(f"{name}:")] for name in SPACES}
    text = "\n".join([*chain.from_iterable(arrays.get(name, ()) for name in SPACES), *sorted(fitted)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def could_be_fitted(id: str) -> bool:
    try:
        case = Case.parse(id)
    except CaseError:
        return False
    return case.capability in SPACES and not SPACES[case.capability].outside(case)


def found_array(space: Space, given: Sequence[Case], stored: Sequence[Case] = ()) -> tuple[list[Case], Pairs]:
    """Cases that, with given ones, hold every pair that a row can hold; and the pairs that none can.

    As many as can be are held by cases that a CPU is asked for. Members are drawn for every row: those are taken that
    add most pairs with residues. Where an array is ``stored``, its rows are taken as far as they are needed.
    """
    if stored:
        kept = needed(space, given, stored)
        return kept, Pairs.every(space) - Pairs(space, space.rows((*given, *kept)))
    members = _Members(space, given)

    def rows_of(case: Case) -> Iterable[Row]:
        return space.rows((case,))

    missing, found = Pairs.every(space) - Pairs(space, space.rows(given)), list[Case]()
    for most in (_LIGHT, CPU_WORK, GPU_WORK):
        cases, missing = cover(space, missing, partial(members.of, most=most), rows_of)
        found += cases
    # The first members alone, since what is drawn is hardly less work.
    largest, impossible = cover(
        space,
        missing,
        lambda row, left: filled(space, first := space.case_of(row), left, partial(_within, work_of(first))),
        rows_of,
        small=True,
    )
    return needed(space, given, [*found, *largest]), impossible


def _within(most: float, case: Case) -> bool:
    return work_of(case) <= most


class _Members:
    def __init__(self, space: Space, given: Iterable[Case]) -> None:
        self._space, self._fine = space, FinePairs(space, given)

    def of(self, row: Row, left: Pairs, most: float) -> Case | None:
        """The case of a row, of a few with no more than so much work, that adds most of what is left, then residues."""
        if work_of(self._space.case_of(row)) > most:  # those that are drawn are hardly less
            return None
        fits = (case for case in self._space.drawn(row) if work_of(case) <= most)

        def added(case: Case) -> tuple[int, int]:
            return left.new_in(self._space.rows((case,))), self._fine.held_by(row, case)

        best = max(islice(fits, _COMPARED), key=added)
        self._fine.drop(row, best)
        return filled(self._space, best, left, partial(_within, most))


def needed(space: Space, given: Iterable[Case], cases: Sequence[Case]) -> list[Case]:
    """Those of some cases without which a pair would be lost, or lost to a CPU; the heaviest are left out first."""
    holders = {False: Counter[Pair](), True: Counter[Pair]()}

    def pairs_of(case: Case) -> dict[bool, list[Pair]]:
        pairs = list({pair for row in space.rows((case,)) for pair in combinations(held(row), 2)})
        return {False: pairs, **({True: pairs} if is_light(case) else {})}

    found = {case: pairs_of(case) for case in cases}
    for pairs in (*map(pairs_of, given), *found.values()):
        for light, each in pairs.items():
            holders[light].update(each)
    for case in sorted(cases, key=work_of, reverse=True):
        if all(holders[light][pair] > 1 for light, pairs in found[case].items() for pair in pairs):
            for light, each in found.pop(case).items():
                holders[light].subtract(each)
    return list(found)


_BATCHES, _TRIES = 24, 80  # dense batches of a role, and how often one is drawn until a CPU is asked for it
_REQUESTS = (33, 34, 40, 48, 63, 64, 65, 66, 72, 96, 97, 100, 127, 128, 129, 130)
_TREES = (2, 2, 3, 4, 5, 9, 17, 33)
_EDGES = (0, 0, 1, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 191, 192, 255, 256, 257)
_FAR = (255, 256, 257, 2047, 2048, 2049, 32_767, 32_768, 40_000, 65_535, 65_536, 70_000)
"""Positions, where the context of a request is nothing but one."""
_LONG = (513, 1100, 1537, 2049, 4200, 9000, 17_000, 33_000, 70_000)
_ROWS = (257, 513, 640, 1100, 2049, 4200)
_BLOCKS = (255, 2049, 32_768, 33_000, 65_536, 66_000)
"""Blocks that no request holds, among which those of the requests lie."""
_SHARED = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 16))
"""Layers that share a buffer of so many blocks, and tokens of a page."""
_REGIMES = (1, 2, 5, 9, 16)  # how many data regimes requests have in turn
_POSITIONS = "positions"
_OF_ANY_NEW = (Role.PREFILL, Role.CACHE, Role.COMPRESS)  # roles whose requests have any number of new tokens, or none
_PLANNED = (Call.CHUNKED_CONTEXT, Call.LAYER)
_SHORT = 43
_RUN = (33, 40, 48)


def dense_cases(space: Space) -> list[Case]:
    """The dense batches and long requests of a role that a CPU is asked for and that are in classes of the space."""
    found = [next(_drawn(space, f"dense {number}", _dense), None) for number in range(_BATCHES)]
    for name, numbers in (("keys", _LONG), ("rows", _ROWS)):
        found += [next(_drawn(space, f"{name} {number}", _long, number), None) for number in numbers]
    return list(dict.fromkeys(filter(None, found)))


def _drawn(space: Space, name: str, changed: Any, *arguments: int) -> Iterator[Case]:
    for attempt in range(_TRIES):
        draw = Draw(f"{space.capability}|{name}|{attempt}")
        row = space.completed((), preferred(space, draw))
        assert row
        with suppress(CaseError):
            case = space.case_of(row, draw)
            case = replace(case, **changed(space, case, draw, name.startswith("rows"), *arguments))
            if space.regimes and len(case.q) > 1:
                many = draw.pick(_REGIMES, "regimes")
                case = replace(case, data="+".join(draw.pick(space.regimes, "regime", n) for n in range(many)))
            if is_light(case) and not space.outside(case):
                yield case


def preferred(space: Space, draw: Draw, classes: Mapping[str, Sequence[str]] | None = None) -> Preference:
    """Any classes, of these where some are given, but mostly those of small batches first where these are named."""

    @cache
    def drawn(name: str, labels: Sequence[str]) -> list[str]:
        usual, known = space.small.get(name, labels), classes[name] if classes else labels
        usual = usual if draw.below(4, "usual", name) else labels
        return sorted(known, key=lambda label: (label not in usual, draw.below(2**32, name, label)))

    return lambda name, labels, row: drawn(name, labels)


def _dense(space: Space, case: Case, draw: Draw, _: bool) -> dict[str, Any]:
    """Tens of requests with lengths of their own: mixed, in runs beyond a warp, or two long ones with short between."""
    trees = case.role is Role.TREE  # few of them with many tokens, since it is trees that differ
    number = draw.pick(_TREES if trees else _REQUESTS, "requests")
    most = draw.pick((8, 16, 40, 65) if trees else (1, 1, 2, 4, 8, 16), "queries")
    one = case.pad or draw.below(2, "one")
    q = [most if one and not case.pad else 1 if case.pad else 1 + draw.below(most, "new", n) for n in range(number)]
    far = any(each.name == _POSITIONS for each in space.dimensions)
    run = draw.pick((1, 1, 1, 1, *_RUN, number), "runs")
    kv = [draw.pick(_FAR if far and draw.below(2, n // run) else _EDGES, "kv", n // run) for n in range(number)]
    # As long as engines have them, above all where a key is a number.
    if draw.below(2 if case.role is Role.TOPK else 6, "larger") == 0:
        kv = [tokens * draw.pick((2, 8, 16), "times") for tokens in kv]
    elif draw.below(3, "long") == 0:
        first, second = draw.below(number, "first"), draw.below(number, "second")
        kv[first], kv[second] = draw.pick((513, 700, 1100), "longer"), draw.pick((513, 1000, 1025), "longest")
    if case.role is Role.SPARSE_LAYER:  # whose keys are made from hidden states, which takes long
        kv = [tokens % _SHORT for tokens in kv]
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


def _long(space: Space, case: Case, draw: Draw, rows: bool, length: int) -> dict[str, Any]:
    number, few = draw.pick((1, 2, 3), "requests"), draw.pick((1, 1, 2, 4, 5, 8), "queries")
    q, kv = [few] * number, [draw.pick(_EDGES, "kv", n) for n in range(number)]
    place = draw.below(number, "longest")
    (q if rows or case.call == Call.NEW_TOKENS or case.role is Role.CACHE else kv)[place] = length
    heads = {"heads": draw.pick((1, 1, 2, 3), "heads")} if case.heads > 1 and case.role is not Role.COMPRESS else {}
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
    room = {"workspace": -(-tokens // 8) * 8} if case.call in _PLANNED else {}
    return {**lengths, **decodes, **room}
