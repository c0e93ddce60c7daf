"""Where an entry holds: a query of cases in the grammar of their ids, and a condition that compares versions.

A condition such as ``compute_capability >= 9.0 and not flash-attn < 2.8`` is ``or`` over ``and`` over comparisons with
a library of the backend or what a report's environment holds; one with something that is not there does not hold.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from packaging.version import Version

from mla_conformance.cases.case import Case, CaseError, parse_fields
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_COMPARISON = re.compile(r"""(not\s+)?([A-Za-z][\w.-]*)\s*(<=|>=|==|!=|<|>)\s*("[^"]*"|'[^']*'|[^\s"'<>=!]+)""")
_LIMIT = re.compile(r"\s*(?P<name>\w+)\s*(?P<sign>[<>~])\s*(?P<value>\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """Alternatives, each of which holds if all of its comparisons hold; of no text, one that always does."""

    alternatives: tuple[tuple[tuple[str, str, str, bool], ...], ...]  # name, operator, value, whether it is negated

    @staticmethod
    def parse(text: str) -> "Condition":
        alternatives = list[tuple[tuple[str, str, str, bool], ...]]()
        for part in " ".join(text.split()).split(" or ") if text.strip() else ():
            comparisons = []
            for said in map(str.strip, part.split(" and ")):
                found = _COMPARISON.fullmatch(said)
                if not found:
                    raise ValueError(f"expected NAME OPERATOR VALUE such as torch < 2.12, got {said!r}")
                negation, name, sign, value = found[1], found[2], found[3], found[4].strip("\"'")
                if sign not in ("==", "!=") and _version(value) is None:
                    raise ValueError(f"{sign} expects a version after it, got {value!r}")
                comparisons.append((name, sign, value, bool(negation)))
            alternatives.append(tuple(comparisons))
        return Condition(tuple(alternatives) or ((),))

    def holds(self, facts: Mapping[str, str]) -> bool:
        def compares(name: str, sign: str, value: str) -> bool:
            actual = facts.get(name, "")
            versions = _version(actual), _version(value)
            if None not in versions:
                return _OPERATORS[sign](*versions)
            return bool(actual) and sign in ("==", "!=") and _OPERATORS[sign](actual, value)

        return any(all(compares(*said) != negated for *said, negated in part) for part in self.alternatives)


def _version(text: str) -> Version | None:
    try:
        return Version(Version(text).public)  # 2.13.0+cpu is 2.13.0
    except ValueError:  # none, or one of thousands of digits
        return None


@dataclass(frozen=True)
class CaseQuery:
    """Cases of a capability with certain fields: ``context_chunk:dtype=fp16``, ``select*:topk>8192``, ``*:data~nan``.

    The capability may end in ``*``, which stands for any end. Of several lengths ``<`` and ``>`` compare the largest;
    ``~`` asks for a data regime of any request. The id of a listed or fitted case names that case alone.
    """

    text: str
    capability: str
    fields: tuple[tuple[str, str, Any], ...]  # name, operator, value

    @staticmethod
    @cache
    def parse(text: str) -> "CaseQuery":
        capability, _, rest = text.strip().partition(":")
        if not capability:
            raise CaseError(f"malformed case query {text!r}: expected 'capability:field=value;…', or '*'")
        fields, equal = [], []
        for part in rest.split(";") if rest else ():
            if found := _LIMIT.fullmatch(part):
                fields.append((found["name"], found["sign"], _limit(**found.groupdict())))
            else:
                equal.append(part)
        fields += [(name, "=", value) for name, value in parse_fields(";".join(equal)).items()]
        return CaseQuery(text.strip(), capability, tuple(fields))

    @cached_property
    def _is_fitted(self) -> bool:
        """Whether this is the whole id of a case of a role's space, which a kernel may have beside the list."""
        try:
            return self.capability in SPACES and Case.parse(self.text).id == self.text
        except CaseError:
            return False

    def matches(self, case: Case) -> bool:
        """Whether the query names this case; a field that its role does not have matches no value."""
        if self._is_fitted or self.text in _listed(self.capability):
            return case.id == self.text
        return _covers(self.capability, case.capability) and all(_holds(case, *field) for field in self.fields)

    @property
    def is_stale(self) -> bool:
        """Whether no case of the suite's list matches, and no fitted one can."""
        return not self._is_fitted and not any(map(self.matches, _listed(self.capability).values()))


def _limit(name: str, sign: str, value: str) -> int | str:
    """What follows < or >, which is a number, or ~, which is a data regime."""
    if sign == "~":
        regime: str = parse_fields(f"{name}={value}")[name]
        if name == "data":
            return regime
    elif value.isdecimal():
        for text in (f"{name}=[{value}]", f"{name}={value}"):  # of several lengths, or one number
            with contextlib.suppress(CaseError):
                if isinstance(parse_fields(text)[name], int | tuple):
                    return int(value)
    raise CaseError(
        f"malformed case query {name}{sign}{value}: expected a field of numbers and a number, as in topk>8192, "
        "or data~ and a data regime"
    )


def _holds(case: Case, name: str, sign: str, value: Any) -> bool:
    has = getattr(case, name, None)
    if sign == "=":
        return bool(has == value)
    if sign == "~":
        return value in case.regimes
    largest = max(has, default=0) if isinstance(has, tuple) else has
    return largest is not None and bool(_OPERATORS[sign](largest, value))


def _covers(pattern: str, capability: str) -> bool:
    return capability.startswith(pattern[:-1]) if pattern.endswith("*") else capability == pattern


@cache
def _listed(pattern: str) -> dict[str, Case]:
    """The listed cases of the capabilities that a query covers, by id; a gate asks for them a thousand times."""
    found = (entry for name, entry in CAPABILITIES.items() if _covers(pattern, name))
    return {case.id: case for entry in found for case in entry.cases}
