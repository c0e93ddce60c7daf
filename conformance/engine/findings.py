"""What a run found so far, as its journal tells it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_conformance.diagnosis.heat_map import HeatMap, is_mapped
from mla_conformance.engine import journal
from mla_conformance.engine.code import LoadedCode
from mla_conformance.judging.record import NOTHING_TRACED, BackendFacts, Record, RecordKey, Traced
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.judging.verdict import Status
from mla_conformance.report.pairs import JudgedPairs
from mla_conformance.report.summary import BackendSummary, summarise


@dataclass
class Findings:
    """What is known of each backend, by its reference, and of each case.

    Attributes:
        verdicts: of cases.
        code: what the processes of backends have loaded.
        traced: what was seen to run.
        traits: when bits are the same, and how errors are spread.
        heat: where the errors of failures are.
        given_up: why the rest of a backend's cases is not run.
    """

    verdicts: dict[RecordKey, Record] = field(default_factory=dict)
    code: LoadedCode = field(default_factory=LoadedCode)
    traced: dict[str, Traced] = field(default_factory=dict)
    traits: dict[str, Traits] = field(default_factory=dict)
    heat: dict[RecordKey, HeatMap] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)

    def keep(self, event: journal.JournalEvent) -> None:
        """Take in an event of the journal."""
        if isinstance(event, journal.Judgement):
            self.verdicts[event.record.record_key] = event.record
        elif isinstance(event, journal.WasTraced):
            self.traced[event.backend] = event.traced
        elif isinstance(event, journal.Examined):
            self.traits[event.backend] = event.traits
        elif isinstance(event, journal.HeatShown):
            self.heat[event.backend, event.case] = event.heat
        elif isinstance(event, journal.CodeLoaded):
            self.code.add(event.loaded)
        elif isinstance(event, journal.GaveUp):
            earlier = self.given_up.get(event.backend)
            self.given_up[event.backend] = f"{earlier}; {event.reason}" if earlier else event.reason

    def forget_lacking(self) -> None:
        """Have cases judged again that this machine has enough memory for: they lacked it, or time to compile."""
        lacking = [key for key, record in self.verdicts.items() if record.is_unjudged]
        for key in lacking:
            del self.verdicts[key]

    @property
    def failures(self) -> list[Record]:
        """The records of what failed."""
        return [record for record in self.verdicts.values() if record.failed]

    def untraced(self) -> dict[str, dict[str, str]]:
        """The fastest case of each capability that an untraced backend passed, by backend and capability."""
        untold = [record for record in self.verdicts.values() if record.reference not in self.traced]
        passed = [record for record in untold if record.status is Status.PASS]
        fastest: dict[str, dict[str, str]] = {}
        for record in sorted(passed, key=lambda record: record.seconds):
            fastest.setdefault(record.reference, {}).setdefault(record.capability, record.case)
        return fastest

    def summary(
        self, facts: BackendFacts, records: Sequence[Record], expected: dict[str, int], pairs: dict[str, JudgedPairs]
    ) -> BackendSummary:
        """The outcome of one backend."""
        return BackendSummary(
            facts,
            () if facts.reasons else summarise(records, expected),
            self.given_up.get(facts.reference, ""),
            self.traced.get(facts.reference, NOTHING_TRACED),
            self._heat_of(records),
            pairs,
            self.traits.get(facts.reference, NO_TRAITS),
        )

    def _heat_of(self, records: Sequence[Record]) -> dict[str, HeatMap]:
        """Where the errors of each case are that fails by a wrong number, as far as it was told."""
        reported = [record for record in records if (record.reference, record.case) in self.heat]
        return {record.case: self.heat[record.reference, record.case] for record in reported if is_mapped(record)}
