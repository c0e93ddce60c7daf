"""What a run over a deployed model's cases says of each backend: which group it falls into, and part by part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Call, Case
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.causes import grouped
from mla_conformance.report.summary import BackendSummary, Counts, Group, RunSummary

_PARTS: Mapping[str, str] = {Call.SPARSE_DECODE: "sparse decode", Call.SPARSE_PREFILL: "sparse prefill"}
_OTHER_ROLES = tuple(f"{role} only" for role in ROLES)
"""How what is said of a case ends whose role a backend does not have."""


def _part_of(case: str) -> str:
    """The part of an engine that a case is of: prefill, decode, layer, indexer, sparse decode or sparse prefill."""
    parsed = Case.parse(case)
    return _PARTS.get(parsed.call, str(parsed.role))


@dataclass(frozen=True)
class ModelAnswer:
    backend: BackendSummary

    @cached_property
    def _records(self) -> dict[str, list[Record]]:
        return grouped(self.backend.records, lambda record: _part_of(record.case))

    @cached_property
    def parts(self) -> dict[str, Counts]:
        return {part: Counts.of(records) for part, records in self._records.items()}

    @property
    def covered(self) -> tuple[str, ...]:
        return tuple(part for part, counts in self.parts.items() if counts.passed)

    @property
    def reported(self) -> str:
        if self.backend.reasons:
            return "; ".join(self.backend.reasons)
        judged, refused = [], {}
        for part, counts in self.parts.items():
            if not counts.verdicts:
                refused[part] = self._reason(part)
                continue
            rest = counts.unsupported + counts.unavailable
            why = f" ({rest} not: {self._reason(part)})" if rest else ""
            judged.append(f"{part} {counts.passed}/{counts.verdicts}{why}")
        # Of parts of which nothing was judged those that it has a class for, or all parts if it has none.
        own = {part: reason for part, reason in refused.items() if not reason.endswith(_OTHER_ROLES)}
        told = [f"no {part}: {reason}" for part, reason in own.items()]
        if len(refused) == len(self.parts) and not own:
            told = [f"{reason}, which this model does not call" for reason in dict.fromkeys(refused.values())]
        waived = dict.fromkeys(record.expectation for record in self.backend.records if record.expectation)
        return " · ".join([*judged, *told, *waived, *filter(None, [self.backend.not_run])])

    def _reason(self, part: str) -> str:
        """Why cases of a part have no verdict, in the words of most of them."""
        without = (Status.UNSUPPORTED, Status.UNAVAILABLE)
        said = Counter(record.message for record in self._records[part] if record.status in without)
        return said.most_common(1)[0][0]


def answers(run: RunSummary) -> list[ModelAnswer]:
    found = [ModelAnswer(backend) for backend in run.backends]
    return sorted(found, key=lambda answer: list(Group).index(answer.backend.group))


def uncovered(run: RunSummary, found: Sequence[ModelAnswer]) -> tuple[str, ...]:
    """The parts that the deployed model calls and that no real kernel is right for here."""
    right = {part for answer in found if answer.backend.group is Group.RIGHT for part in answer.covered}
    return tuple(part for part in dict.fromkeys(map(_part_of, run.cases)) if part not in right)
