"""Covering arrays as they are found, which takes minutes; those of the suite are kept. No torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations, islice
from math import inf
from typing import TypeVar

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import FinePairs, Pair, Pairs, filled
from mla_conformance.cases.space import Row, Space, held
from mla_conformance.cases.work import CPU_WORK, GPU_WORK, is_light, work_of

_T = TypeVar("_T")
_ROWS = 4  # rows of which the one that holds most of what is missing is taken
_LIGHT = 2e7  # work of a case of an array that is taken where there is one
_FOUND_AGAIN = (2, 3, 5, 2, 3)  # cases that hold so few pairs alone are found again, each time together
_COMPARED = 6  # draws of members of a row that fit a device, of which the best is taken


def cover(
    space: Space,
    missing: Pairs,
    made: Callable[[Row, Pairs], _T | None],
    rows_of: Callable[[_T], Iterable[Row]],
    small: bool = False,
) -> tuple[list[_T], Pairs]:
    """Cases of rows that hold all pairs which are missing and which such a row holds; and the other pairs.

    ``made`` gives the case of a row by what is still missing; where it gives None, a row with smaller batches is tried,
    as is at first if ``small``. A case holds ``rows_of`` it.
    """
    found, left, without = list[_T](), missing.copy(), Pairs(space)
    while pairs := left.densest(_ROWS):
        case = None
        for few in (True,) if small else (False, True):
            rows = (space.completed(pair, partial(left.dense, small=few)) for pair in pairs)
            for row in sorted(filter(None, rows), key=left.held_by, reverse=True):
                case = case or made(row, left)
        if case:
            found.append(case)
            for each in rows_of(case):
                left.drop(each)
        else:
            without.add(dict(pairs[0]))
            left.drop(dict(pairs[0]))
    return found, without


def found_array(space: Space, given: Sequence[Case]) -> tuple[list[Case], Pairs]:
    """Cases that, with given ones, hold every pair that a row can hold; and the pairs that none can.

    As many as can be are held by cases that a CPU is asked for. Members are drawn for every row: those are taken that
    add most pairs with residues. Cases that hold little alone are found again together, which makes them fewer.
    """
    fine = FinePairs(space, given)

    def rows_of(case: Case) -> Iterable[Row]:
        return space.rows((case,))

    def member(row: Row, left: Pairs, most: float) -> Case | None:
        """The case of a row, of a few with no more than so much work, that adds most of what is left, then residues."""
        first = space.case_of(row)
        if most == inf:  # the first members alone, since what is drawn is hardly less work
            return filled(space, first, left, lambda case: work_of(case) <= work_of(first))
        if work_of(first) > most:
            return None
        fits = (case for case in space.drawn(row) if work_of(case) <= most)
        best = max(islice(fits, _COMPARED), key=lambda case: (left.new_in(rows_of(case)), fine.held_by(row, case)))
        fine.drop(row, best)
        return filled(space, best, left, lambda case: work_of(case) <= most)

    def covered(missing: Pairs, *sizes: float) -> tuple[list[Case], Pairs]:
        found = list[Case]()
        for most in sizes:
            cases, missing = cover(space, missing, partial(member, most=most), rows_of, small=most == inf)
            found += cases
        return found, missing

    def held_by(cases: Iterable[Case]) -> Pairs:
        return Pairs(space, space.rows(cases))

    found, missing = covered(Pairs.every(space) - held_by(given), _LIGHT, CPU_WORK, GPU_WORK, inf)
    kept = needed(space, given, found)
    light, every = held_by(filter(is_light, (*given, *kept))), held_by((*given, *kept))
    for few in _FOUND_AGAIN:
        own, holders = _held(space, given, kept)  # what no other one holds, or no other that a CPU is asked for, counts
        alone = {case: sum(holders[cpu][pair] == 1 for cpu in own[case] for pair in own[case][cpu]) for case in kept}
        rest = [case for case in kept if alone[case] > few]
        again, lost = covered(light - held_by(filter(is_light, (*given, *rest))), _LIGHT, CPU_WORK)
        more, lost_to_all = covered(every - held_by((*given, *rest, *again)), GPU_WORK, inf)
        again += [*more, *(x for x in kept if (lost if is_light(x) else lost_to_all).new_in(rows_of(x)))]
        kept = min(kept, needed(space, given, list(dict.fromkeys((*rest, *again)))), key=len)
    return kept, missing


def needed(space: Space, given: Iterable[Case], cases: Sequence[Case]) -> list[Case]:
    """Those of some cases without which a pair would be lost, or lost to a CPU; the heaviest are left out first."""
    found, holders = _held(space, given, cases)
    for case in sorted(cases, key=work_of, reverse=True):
        if all(holders[light][pair] > 1 for light, pairs in found[case].items() for pair in pairs):
            for light, each in found.pop(case).items():
                holders[light].subtract(each)
    return list(found)


_Held = dict[bool, list[Pair]]  # pairs, and under True once more those of a case that a CPU is asked for


def _held(
    space: Space, given: Iterable[Case], cases: Iterable[Case]
) -> tuple[dict[Case, _Held], dict[bool, Counter[Pair]]]:
    """What each of some cases holds, and how many of these and the given ones hold each pair."""
    holders = {False: Counter[Pair](), True: Counter[Pair]()}

    def pairs_of(case: Case) -> _Held:
        pairs = list({pair for row in space.rows((case,)) for pair in combinations(held(row), 2)})
        return {False: pairs, **({True: pairs} if is_light(case) else {})}

    found = {case: pairs_of(case) for case in cases}
    for pairs in (*map(pairs_of, given), *found.values()):
        for light, each in pairs.items():
            holders[light].update(each)
    return found, holders
