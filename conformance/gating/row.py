"""What a gate finds, line by line."""

from dataclasses import dataclass
from enum import StrEnum


class Finding(StrEnum):
    """What a gate finds, in the order in which it is shown."""

    MISSING = "missing"
    INCOMPLETE = "not run"
    FAILING = "failing"
    NEWLY_FAILING = "newly failing"
    LOST = "no longer judged"
    UNEXPECTED_PASS = "unexpected pass"
    MUST_PASS = "must pass"
    EXPECTATION = "expectation"
    NEWLY_PASSING = "newly passing"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Row:
    """One line of the gate's table.

    Attributes:
        finding: its kind.
        backend: whom it is about, or ``*``.
        what: a case, or what else it is about.
        detail: what is to be said of that.
        cases: how many it adds to those of its kind.
    """

    finding: Finding
    backend: str
    what: str
    detail: str
    cases: int = 1
