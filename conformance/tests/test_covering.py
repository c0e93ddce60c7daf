"""Covering arrays: complete, small, allowed, and the same every time."""

from itertools import combinations, product

import pytest

from mla_conformance.backends.roles import Role
from mla_conformance.cases.covering import Pairs, cover
from mla_conformance.cases.space import NOTHING, Dimension, Only, Row, Rule, Space, held, never
from mla_conformance.cases.triples import Triples

CLASSES = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r", "s"), "d": ("0", "1")}
DEPENDS = Only("a", ("2", "3"), "only beside another a")


def space(*rules: Rule, only: Only | None = None) -> Space:
    """Of these classes, with these rules; ``d`` depends on ``a`` where asked."""
    dimensions = [
        Dimension(name, {label: {} for label in labels}, lambda case: None, only if only and name == "d" else Only())
        for name, labels in CLASSES.items()
    ]
    small = {"c": ("p", "q", "r")}
    return Space(Role.PREFILL, "combinations", tuple(dimensions), rules, lambda row, draw: {}, small)


FREE = space()
SPACES = {
    "free": FREE,
    "a pair": space(never("no 1 with y", {"a": ("1",), "b": ("y",)})),
    "a dimension that decides": space(
        Rule("s needs both", ("a", "c"), lambda a, c: c != "s" or a == "1"),
        Rule("s needs both", ("d", "c"), lambda d, c: c != "s" or d == "0"),
    ),
    "together": space(
        never("no 1 with y", {"a": ("1",), "b": ("y",)}), never("no x with p", {"b": ("x",), "c": ("p",)})
    ),
    "dependent": space(only=DEPENDS),
}
every = pytest.mark.parametrize("given", SPACES.values(), ids=list(SPACES))


def possible_rows(given: Space) -> list[Row]:
    """All rows of a space, found by trying everything."""
    labels = [(*each.classes, NOTHING) if each.only.name else tuple(each.classes) for each in given.dimensions]
    rows = (dict(zip(CLASSES, classes, strict=True)) for classes in product(*labels))
    return [row for row in rows if all((row[d.name] != NOTHING) == d.has_say(row) for d in given.dimensions)]


def allowed(given: Space, row: Row) -> bool:
    return all(rule.allows(row) for rule in given.all_rules)


def taken(row: Row, left: Pairs) -> Row:
    return dict(row)


def alone(row: Row) -> list[Row]:
    return [row]


@every
def test_every_pair_that_can_be_is_held_and_no_other(given: Space) -> None:
    rows, impossible = cover(given, Pairs.every(given), taken, alone)
    assert all(allowed(given, row) and list(row) == list(CLASSES) for row in rows)
    possible = {
        frozenset(pair) for row in possible_rows(given) if allowed(given, row) for pair in combinations(held(row), 2)
    }
    assert set(map(frozenset, Pairs(given, rows))) == possible
    assert set(map(frozenset, Pairs.every(given))) - possible == set(map(frozenset, impossible))


@every
def test_an_excluded_pair_has_a_rule_that_says_why(given: Space) -> None:
    for pair in cover(given, Pairs.every(given), taken, alone)[1]:
        reason = given.reason(pair)
        together = pair == (("a", "1"), ("c", "p"))
        expected = {"several rules together"} if together else {rule.why for rule in given.all_rules}
        assert reason in expected, pair


def test_where_a_row_is_not_accepted_a_smaller_one_is_tried() -> None:
    rows, without = cover(FREE, Pairs.every(FREE), lambda row, left: row if row["c"] != "s" else None, alone)
    assert rows and all(row["c"] != "s" for row in rows)
    assert set(without) == {pair for pair in Pairs.every(FREE) if ("c", "s") in pair}


@every
def test_triples_are_those_whose_classes_are_pairs_two_by_two(given: Space) -> None:
    pairs = Pairs(given, (row for row in possible_rows(given) if allowed(given, row)))
    together = set(map(frozenset, pairs))
    ordered = {value: number for number, value in enumerate(given.values)}
    left, found = Triples(pairs), set()
    expected = {
        triple for triple in combinations(ordered, 3) if set(map(frozenset, combinations(triple, 2))) <= together
    }
    while triple := left.densest():
        assert triple in expected and list(triple) == sorted(triple, key=ordered.__getitem__)
        left.drop(dict(triple))
        found.add(triple)
        assert len(left) == len(expected) - len(found)
    assert found == expected
