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
    """One line of the gate's table."""

    finding: Finding
    backend: str
    what: str
    detail: str
