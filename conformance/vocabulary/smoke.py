"""Which of a capability's cases the smoke tier takes. No torch.

Beside the first of each list it takes what has shown its worth: the cases that were the first to kill a known defect in
the stored run over all of them, so that the choice follows when that run is made again.
"""

import json
from collections.abc import Collection, Sequence
from functools import cache
from importlib.resources import files

from mla_conformance.cases.case import Case

_FIRST = 2


def smoke_cases(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The first cases, the first of each role, since a decode has its laws too, and those that kill; in their order."""
    first = {case.role: case for case in reversed(cases)}
    return with_killing(cases, (*cases[:_FIRST], *first.values()))


def with_killing(cases: Sequence[Case], taken: Collection[Case]) -> tuple[Case, ...]:
    """The cases that are taken anyway and those that kill; in their order."""
    return tuple(case for case in cases if case in taken or case.id in _killing())


@cache
def _killing() -> frozenset[str]:
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text)["killing_cases"].values())
