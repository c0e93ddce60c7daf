"""Which cases hold every pair of classes of a space, as ``ci/arrays.py`` found them, which takes minutes. No torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from itertools import chain

from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import SESSIONS, Case, CaseError
from mla_conformance.cases.space import Space

_OURS: list[Space] = [
    getattr(import_module(f"mla_conformance.roles.{role}.case"), role.upper()) for role in ROLES.values()
]
SPACES = {space.capability: space for space in _OURS}  # by the capability whose cases their arrays are
KEPT: dict[str, list[str]] = {  # the ids of each array; of that of a role from outside once it is taken up
    capability: [f"{capability}:{fields}" for fields in array]
    for capability, array in json.loads((files("mla_conformance.fixtures") / "arrays.json").read_text()).items()
}


@cache
def array_of(capability: str) -> tuple[Case, ...]:
    """The cases of a capability's covering array."""
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
    space = next((each for each in SPACES.values() if each.role is case.role), None)
    if space is None:
        return False
    # A session has a workspace for its other batches too, whose size may be outside of the space.
    return case.capability == SESSIONS or (case.capability == space.capability and not space.outside(case))
