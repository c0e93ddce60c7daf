"""A query of cases in the grammar of their ids."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mla_conformance.cases.case import Case, CaseError, parse_fields
from mla_conformance.vocabulary.capabilities import CAPABILITIES


@dataclass(frozen=True)
class CaseQuery:
    """Cases of a capability with certain fields: ``context_chunk:dtype=fp16``, ``*:heads=128``, ``merge*``.

    The capability may end in ``*``, which stands for any end. The id of a listed case names that case alone.
    """

    text: str
    capability: str
    fields: tuple[tuple[str, Any], ...]

    @staticmethod
    def parse(text: str) -> "CaseQuery":
        """The query that ``text`` writes.

        Raises:
            CaseError: no capability, an unknown field, or a value that does not fit it.
        """
        capability, _, rest = text.strip().partition(":")
        if not capability:
            raise CaseError(f"malformed case query {text!r}: expected 'capability:field=value;…', or '*'")
        return CaseQuery(text.strip(), capability, tuple(parse_fields(rest).items()))

    @cached_property
    def _names_one(self) -> bool:
        return any(case.id == self.text for case in self._of_capability())

    def _of_capability(self) -> list[Case]:
        return [case for entry in CAPABILITIES.values() for case in entry.cases if self._covers(case.capability)]

    def _covers(self, capability: str) -> bool:
        if self.capability.endswith("*"):
            return capability.startswith(self.capability[:-1])
        return capability == self.capability

    def matches(self, case: Case) -> bool:
        """Whether the query names this case; a field that its role does not have matches no value."""
        if self._names_one:
            return case.id == self.text
        return self._covers(case.capability) and all(getattr(case, name, None) == value for name, value in self.fields)

    @property
    def is_stale(self) -> bool:
        """Whether no case of the suite's list matches."""
        return not any(self.matches(case) for case in self._of_capability())
