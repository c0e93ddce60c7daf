"""The dispatch grid: a tiny case for each cell by which kernels choose among their instances. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any

from mla_conformance.cases import batches
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import is_light, work_of
from mla_conformance.vocabulary.dense import preferred

_HEADS = (1, 2, 4, 6, 8, 16, 20, 32, 64, 128)
_QUERIES = {"1": 1, "2": 2, "4": 4, "5 to 8": 8}
_TRIES, _COMPARED = 6, 2


def grid_cases(space: Space, classes: Mapping[str, Sequence[str]]) -> list[Case]:
    """Cases of every cell of the grids of a space, of these classes of its dimensions.

    What else varies is drawn by hash, so that a cell is no cell of one layout or dtype alone.
    """
    heads: Sequence[int] = _HEADS if "heads" in classes else (0,)
    found = []
    for names in space.grids:
        labels: list[list[str]] = [
            [label for label in classes[name] if name != "queries" or label in _QUERIES] for name in names
        ]
        for number, cell in product(heads, product(*labels)):
            cases = islice(_in_cell(space, classes, number, dict(zip(names, cell, strict=True))), _COMPARED)
            found.append(min(cases, key=work_of, default=None))
    return list(dict.fromkeys(filter(None, found)))


def _in_cell(space: Space, classes: Mapping[str, Sequence[str]], heads: int, cell: dict[str, str]) -> Iterator[Case]:
    """Cases with so many heads in the classes of a cell."""
    wanted = {**cell, **({"heads": str(batches.HEADS.class_of(heads))} if heads else {})}
    if any(label not in classes[name] for name, label in wanted.items()):
        return
    for attempt in range(_TRIES):
        draw = Draw(f"{space.capability}|{heads}|{wanted}|{attempt}")
        row = space.completed(wanted.items(), preferred(space, draw, classes))
        with suppress(CaseError):
            case = space.case_of(row, draw) if row else None
            changes: dict[str, Any] = {"heads": heads} if heads and case else {}
            if case and case.q and cell.get("queries") in _QUERIES:
                changes["q"] = (_QUERIES[cell["queries"]],) * len(case.q)
            if case and is_light(case := replace(case, **changes)) and not space.outside(case):
                yield case
