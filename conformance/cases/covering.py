"""Covering arrays: few rows in which every combination of values of any so many dimensions occurs. No torch.

A dimension has a name and values; a row gives each dimension one value. Rows of strength t hold every combination of
values of every t dimensions. Faults that need t particular values at once are met by strength t (Kuhn, Wallace and
Gallo 2004 found almost all to need at most three). Rows are built greedily and without chance.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

Dimensions = Mapping[str, Sequence[str]]
Row = Mapping[str, str]
Allowed = Callable[[Row], bool]
"""Whether a row that may still lack dimensions can become one; more values never make it allowed again."""
Combination = frozenset[tuple[str, str]]
"""(dimension, value) pairs."""


def covered(rows: Iterable[Row], dimensions: Dimensions, strength: int) -> set[Combination]:
    """The combinations that rows hold; a value that is not listed is in none."""
    return {combination for row in rows for combination in _held(row, dimensions, strength)}


def required(dimensions: Dimensions, strength: int, allowed: Allowed) -> list[Combination]:
    """Every combination that some allowed row holds, in the order of the dimensions and values."""
    usual = {name: values[0] for name, values in dimensions.items()}

    def can_be(combination: Combination) -> bool:
        row = dict(combination)  # mostly the first values of the other dimensions go with it
        return allowed({**usual, **row}) or _completed(row, dimensions, allowed) is not None

    return [combination for combination in _every(dimensions, strength) if can_be(combination)]


def cover(dimensions: Dimensions, strength: int, given: Iterable[Row], allowed: Allowed) -> list[Row]:
    """Rows that together with the ``given`` ones hold every combination of ``strength`` dimensions."""
    have = covered(given, dimensions, strength)
    missing = dict.fromkeys(combination for combination in _every(dimensions, strength) if combination not in have)
    rows: list[Row] = []

    def gain(row: Row, pair: tuple[str, str]) -> int:
        others = combinations(row.items(), strength - 1)
        return sum(frozenset((pair, *other)) in missing for other in others)

    while missing:
        wanted = next(iter(missing))
        row = _completed(dict(wanted), dimensions, allowed, gain)
        if row is None:
            del missing[wanted]
            continue
        for combination in _held(row, dimensions, strength):
            missing.pop(combination, None)
        rows.append(row)
    return rows


def _every(dimensions: Dimensions, strength: int) -> Iterator[Combination]:
    """The combinations of all values, in the order of the dimensions and values."""
    for names in combinations(dimensions, strength):
        for values in product(*(dimensions[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))


def choose(rows: Sequence[Row], dimensions: Dimensions, strength: int, given: Iterable[Row]) -> list[int]:
    """Numbers of few rows that, with the ``given`` ones, hold every combination that all rows hold."""
    held = [covered([row], dimensions, strength) for row in rows]
    missing = set().union(*held) - covered(given, dimensions, strength)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(held[number] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _held(row: Row, dimensions: Dimensions, strength: int) -> Iterator[Combination]:
    pairs = [(name, row[name]) for name, values in dimensions.items() if row.get(name) in values]
    return map(frozenset, combinations(pairs, strength))


def _completed(
    row: dict[str, str],
    dimensions: Dimensions,
    allowed: Allowed,
    gain: Callable[[Row, tuple[str, str]], int] = lambda row, pair: 0,
) -> dict[str, str] | None:
    """An allowed row that holds ``row``, each further value the one of the largest gain that can be; None without."""
    if not allowed(row):
        return None
    name = next((name for name in dimensions if name not in row), None)
    if name is None:
        return {name: row[name] for name in dimensions}
    for value in sorted(dimensions[name], key=lambda value: gain(row, (name, value)), reverse=True):
        grown = _completed({**row, name: value}, dimensions, allowed, gain)
        if grown is not None:
            return grown
    return None
