"""Conditions of expectations: ``compute_capability >= 9.0 and flash-attn < 2.8``, compared as versions.

A condition is ``or`` over ``and`` over comparisons ``NAME OPERATOR VALUE``, each with an optional ``not`` before it. A
NAME is a library of the backend, or one of what a report's environment holds: torch, python, device,
compute_capability, platform, version. A comparison with something that is not there does not hold.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_COMPARISON = re.compile(r"""(not\s+)?([A-Za-z][\w.-]*)\s*(<=|>=|==|!=|<|>)\s*("[^"]*"|'[^']*'|[^\s"'<>=!]+)""")


class ConditionError(ValueError):
    """A condition outside the grammar."""


@dataclass(frozen=True)
class Comparison:
    """One comparison; two versions compare as such, anything else for equality only."""

    name: str
    sign: str
    value: str
    negated: bool

    @staticmethod
    def parse(text: str) -> "Comparison":
        """The comparison that ``text`` writes.

        Raises:
            ConditionError: it is none, or orders by something that is not a version.
        """
        found = _COMPARISON.fullmatch(text.strip())
        if not found:
            raise ConditionError(f"expected NAME OPERATOR VALUE such as torch < 2.12, got {text.strip()!r}")
        negation, name, sign, value = found.groups()
        value = value.strip("\"'")
        if sign not in ("==", "!=") and _version(value) is None:
            raise ConditionError(f"{sign} expects a version after it, got {value!r}")
        return Comparison(name, sign, value, bool(negation))

    def holds(self, facts: Mapping[str, str]) -> bool:
        """Whether it holds for these facts."""
        return self._compare(facts.get(self.name, "")) != self.negated

    def _compare(self, actual: str) -> bool:
        if not actual:
            return False
        versions = _version(actual), _version(self.value)
        if None not in versions:
            return _OPERATORS[self.sign](*versions)
        return self.sign in ("==", "!=") and _OPERATORS[self.sign](actual, self.value)


@dataclass(frozen=True)
class Condition:
    """Alternatives, each of which holds if all of its comparisons hold."""

    alternatives: tuple[tuple[Comparison, ...], ...]

    @staticmethod
    def parse(text: str) -> "Condition":
        """The condition that ``text`` writes; an empty text always holds.

        Raises:
            ConditionError: it is outside the grammar.
        """
        if not text.strip():
            return Condition(((),))
        alternatives = " ".join(text.split()).split(" or ")
        return Condition(tuple(tuple(map(Comparison.parse, part.split(" and "))) for part in alternatives))

    def holds(self, facts: Mapping[str, str]) -> bool:
        """Whether it holds for these facts."""
        return any(all(comparison.holds(facts) for comparison in part) for part in self.alternatives)


def _version(text: str) -> Version | None:
    try:
        return Version(Version(text).public)  # 2.13.0+cpu is 2.13.0
    except ValueError:  # none, or one of thousands of digits
        return None
