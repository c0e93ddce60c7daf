"""Covering arrays: complete, small, allowed, and the same every time."""

from itertools import combinations, product

import pytest

from mla_conformance.cases.combinations import Row, choose, cover, covered, required

DIMENSIONS = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r", "s"), "d": ("0", "1")}


def anything(_: Row) -> bool:
    return True


def no_first_with_y(row: Row) -> bool:
    return not (row.get("a") == "1" and row.get("b") == "y")


def a_decides_d(row: Row) -> bool:
    """Every combination of b and d is allowed, and none with a = 1 and d = 1; c = s needs both."""
    return not (row.get("c") == "s" and (row.get("a", "1") != "1" or row.get("d", "0") != "0"))


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
@pytest.mark.parametrize("allowed", [anything, no_first_with_y, a_decides_d])
def test_every_combination_that_can_be_is_held(strength: int, allowed: object) -> None:
    assert callable(allowed)
    rows = cover(DIMENSIONS, strength, [], allowed)
    assert all(allowed(row) and list(row) == list(DIMENSIONS) for row in rows)
    every = (dict(zip(DIMENSIONS, values, strict=True)) for values in product(*DIMENSIONS.values()))
    possible = {frozenset(held) for row in every if allowed(row) for held in combinations(row.items(), strength)}
    assert covered(rows, DIMENSIONS, strength) == possible == set(required(DIMENSIONS, strength, allowed))


def test_pairs_take_about_as_many_rows_as_the_two_largest_dimensions_need() -> None:
    assert len(cover(DIMENSIONS, 2, [], anything)) <= 14  # 12 pairs of a and c
    ten = {str(number): ("0", "1", "2") for number in range(10)}
    assert len(cover(ten, 2, [], anything)) <= 25  # of 59,049


def test_given_rows_are_not_repeated() -> None:
    rows = cover(DIMENSIONS, 2, [], anything)
    assert cover(DIMENSIONS, 2, rows, anything) == []
    rest = cover(DIMENSIONS, 2, rows[:5], anything)
    assert covered([*rows[:5], *rest], DIMENSIONS, 2) == covered(rows, DIMENSIONS, 2)


def test_a_given_row_may_lack_dimensions_or_have_other_values() -> None:
    assert covered([{"a": "1", "b": "other", "d": "0"}], DIMENSIONS, 2) == {frozenset({("a", "1"), ("d", "0")})}


def test_the_same_every_time() -> None:
    assert cover(DIMENSIONS, 3, [], anything) == cover(DIMENSIONS, 3, [], anything)


def test_few_rows_are_chosen_that_hold_what_all_hold() -> None:
    rows = list(cover(DIMENSIONS, 2, [], anything))
    numbers = choose(rows, DIMENSIONS, 1, [])
    assert covered([rows[number] for number in numbers], DIMENSIONS, 1) == covered(rows, DIMENSIONS, 1)
    assert len(numbers) <= 5 and choose(rows, DIMENSIONS, 1, rows) == []
