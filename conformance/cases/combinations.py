"""What varies in the cases of a prefill backend, and the combinations of it that a tier must hold. No torch.

Beside the hand-picked lists, the full tier holds every pair of these values and the nightly tier every triple, as far
as a case can have them; what the lists hold already is not added again.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mla_conformance.cases.case import Call, Case, CaseError, Layout
from mla_conformance.cases.covering import Combination, Row, choose, cover, covered, required
from mla_conformance.cases.prefill import PrefillCase

PAIRS, TRIPLES = 2, 3
COMBINATIONS = "combinations"
"""The capability whose cases are the further ones."""

_ENTRIES = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)

_LENGTHS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((1,), (257,)),
    "tiles": ((64, 65), (128, 129)),
    "ragged": ((5, 9, 3, 33), (64, 0, 300, 17)),
    "many": ((3,) * 12, tuple(range(5, 17))),
    "empty": ((3, 0, 5), (0, 40, 17)),
}
"""New tokens and context tokens of each request."""

_FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "call": {call.value: {"call": call.value} for call in _ENTRIES},
    "data": {name: {"data": name} for name in ("normal", "needle", "hot_tail", "large_logits", "outliers", "rising")},
    "lengths": {name: {} for name in _LENGTHS},
    "dims": {name: {"dims": name} for name in ("r1", "glm", "small", "128-0-128-512", "16-8-40-32")},
    "layout": {layout.value: {"layout": layout.value} for layout in Layout},
    "dtype": {name: {"dtype": name} for name in ("bf16", "fp16", "fp32")},
    "heads": {str(heads): {"heads": heads} for heads in (1, 4, 16)},
    "scale": {str(scale): {"scale": scale} for scale in (50, 159, 237)},
    "cache": {f"{page}/{room}": {"page": page, "workspace": room} for page, room in ((16, 256), (1, 96), (64, 320))},
    "excluded": {"none": {"pad": 0}} | {name: {"pad": 3, "poison": name} for name in ("nan", "inf", "large")},
    "lse": {"asked": {"lse": True}, "not asked": {"lse": False}},
    "out": {"given": {"out": True}, "made": {"out": False}},
    "maxima": {"true": {"inflate": 1}, "loose": {"inflate": 100}},
}
"""Dimensions with the fields that their values stand for; ``lengths`` depends on the entry as well."""

DIMENSIONS: Mapping[str, tuple[str, ...]] = {name: tuple(values) for name, values in _FIELDS.items()}


def allowed(row: Row) -> bool:
    """Whether a case can have these values, each with an effect on the entry that it drives."""
    call = row.get("call")
    if call is None:
        return True
    if call != Call.CHUNKED_CONTEXT and row.get("cache", "16/256") != "16/256":
        return False
    if call != Call.NEW_TOKENS and row.get("lse") == "not asked":
        return False
    if call == Call.CONTEXT_CHUNK and row.get("out") == "given":
        return False
    return not {"lengths", "cache"} <= set(row) or _planned(call, row["lengths"], row["cache"])


@cache
def _planned(call: str, lengths: str, paging: str) -> bool:
    """Whether the workspace holds a page of each request."""
    try:
        case_of({"call": call, "lengths": lengths, "cache": paging})
    except CaseError:
        return False
    return True


def case_of(row: Row) -> Case:
    """The case of a row; a dimension that it lacks has its default."""
    call, (new, context) = row["call"], _LENGTHS[row["lengths"]]
    values = {name: value for part in row for name, value in _FIELDS[part][row[part]].items()}
    kv = () if call == Call.NEW_TOKENS else context
    return PrefillCase(**{"capability": COMBINATIONS, "q": new, "kv": kv, **values})


def row_of(case: Case) -> Row:
    """The values that a case has; a dimension of which it has another value is missing."""
    found = {
        name: label
        for name, values in _FIELDS.items()
        for label, wanted in values.items()
        if wanted and all(getattr(case, field) == value for field, value in wanted.items())
    }
    for label, (new, context) in _LENGTHS.items():
        if case.q == new and case.kv in ((), context):
            found["lengths"] = label
    return found


def further_cases(cases: Iterable[Case], strength: int) -> tuple[Case, ...]:
    """The cases that ``cases`` lack for this strength."""
    return tuple(case_of(row) for row in cover(DIMENSIONS, strength, _rows(cases), allowed))


def telling_cases(further: Sequence[Case], cases: Iterable[Case]) -> tuple[Case, ...]:
    """Few of the further cases, with which every value that they hold is in some case."""
    numbers = choose(list(map(row_of, further)), DIMENSIONS, 1, _rows(cases))
    return tuple(further[number] for number in numbers)


def strength_share(cases: Iterable[Case], strength: int) -> float:
    """Fraction of the combinations of so many dimensions that these cases hold."""
    wanted = _required(strength)
    return len(covered(_rows(cases), DIMENSIONS, strength).intersection(wanted)) / len(wanted)


@cache
def _required(strength: int) -> list[Combination]:
    return required(DIMENSIONS, strength, allowed)


def _rows(cases: Iterable[Case]) -> list[Row]:
    return [row_of(case) for case in cases if case.capability in (*_ENTRIES, COMBINATIONS)]
