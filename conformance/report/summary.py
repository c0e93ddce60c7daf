"""The outcome of a run, counted: per backend and capability, with the denominator. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.cases.sharding import Shard
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import EXPLORED, NOTHING_TRACED, BackendFacts, Record, Traced
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.judging.verdict import FAILED, Status
from mla_conformance.models.profile import Deployment
from mla_conformance.report.causes import Cause, causes
from mla_conformance.report.pairs import JudgedPairs
from mla_conformance.speed.times import Speed

Number = Annotated[int, Meta(ge=0, le=2**53)]


class Counts(Struct, frozen=True):
    """Cases by what became of them; all but ``listed`` exclude each other and add up to it."""

    listed: Number = 0  # cases of the list
    passed: Number = 0  # judged right
    failed: Number = 0  # failed, crashed, hung, passed against an expectation, or not judged for a fault of the harness
    unsupported: Number = 0  # declared unsupported
    unavailable: Number = 0  # not judged here, for want of memory, or of time to compile
    waived: Number = 0  # failed as an expectation says
    not_run: Number = 0  # without a record

    @staticmethod
    def of(records: Iterable[Record], listed: int = 0) -> "Counts":
        """The counts of records, of which a list wants ``listed`` at least; a record may stand for several cases."""
        found: dict[str, int] = {}
        for record in records:
            name = _NAMES[record.status]
            found[name] = found.get(name, 0) + record.cases
        run = sum(found.values())
        return Counts(listed=max(listed, run), not_run=max(listed - run, 0), **found)

    @property
    def judged(self) -> int:
        """The denominator: cases that were to be judged, without those that are declared unsupported."""
        return self.listed - self.unsupported

    @property
    def verdicts(self) -> int:
        """Cases that were judged, whatever came out."""
        return self.passed + self.failed + self.waived

    def noted(self, **words: str) -> list[str]:
        """Those of these counts that are not 0, in this order, each with its words."""
        return [f"{number} {said}" for name, said in words.items() if (number := getattr(self, name))]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) + getattr(other, name) for name in Counts.__struct_fields__))


_NAMES = {
    Status.PASS: "passed",
    Status.UNSUPPORTED: "unsupported",
    Status.UNAVAILABLE: "unavailable",
    Status.EXPECTED_FAILURE: "waived",
    **dict.fromkeys(FAILED, "failed"),
}


class BackendOutcome(StrEnum):
    """Status of a capability or a backend."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    NOT_RUN = "not_run"


SIGN = {
    BackendOutcome.PASS: "✔",
    BackendOutcome.FAIL: "✘",
    BackendOutcome.UNSUPPORTED: "–",
    BackendOutcome.NOT_RUN: "?",
    BackendOutcome.UNAVAILABLE: "?",
}
FORESEEN = "!"  # the sign of what failed as an expectation says


@dataclass(frozen=True)
class CapabilitySummary:
    name: str  # the capability
    listed: int  # cases that the run's list holds for it; drawn ones are not among them
    records: tuple[Record, ...]  # what was run

    @cached_property
    def counts(self) -> Counts:
        return Counts.of(self.records, self.listed)

    @property
    def failures(self) -> tuple[Record, ...]:
        """Cases that failed, crashed, hung, or could not be judged for a fault of the harness."""
        return tuple(record for record in self.records if record.failed)

    @property
    def outcome(self) -> BackendOutcome:
        """A failure decides; then a case that was not run, or could not be judged; then whether anything was judged.

        A case that is too large for the device by the suite's own estimate takes nothing from those that are not.
        """
        counts = self.counts
        if counts.failed:
            return BackendOutcome.FAIL
        if counts.not_run:
            return BackendOutcome.NOT_RUN
        if any(record.is_unjudged for record in self.records):
            return BackendOutcome.UNAVAILABLE
        if counts.passed or counts.waived:
            return BackendOutcome.PASS
        return BackendOutcome.UNAVAILABLE if counts.unavailable else BackendOutcome.UNSUPPORTED


@dataclass(frozen=True)
class BackendSummary:
    facts: BackendFacts  # what it is here
    capabilities: tuple[CapabilitySummary, ...] = ()  # one entry per selected capability; none if it is unavailable
    stopped: str = ""  # why the rest of its cases was not run, or empty
    traced: Traced = NOTHING_TRACED  # what was seen to run
    # where the errors of a failure are, by case, of those that were explained
    heat: Mapping[str, HeatMap] = field(default_factory=dict)
    # by role, the pairs of classes that were claimed and judged, where the covering arrays were asked
    pairs: Mapping[str, JudgedPairs] = field(default_factory=dict)
    traits: Traits = NO_TRAITS  # what was found beside verdicts, where that was asked for
    speed: Speed | None = None  # its times, if it is right and was timed

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is unavailable; empty if it was run."""
        return self.facts.reasons

    @property
    def counts(self) -> Counts:
        return sum((capability.counts for capability in self.capabilities), Counts())

    @property
    def not_run(self) -> str:
        """How many cases have no verdict and why, in words; empty if all have one."""
        missing = self.counts.not_run
        return f"{missing} NOT RUN" + (f": {self.stopped}" if self.stopped else "") if missing else ""

    @property
    def records(self) -> list[Record]:
        return [record for capability in self.capabilities for record in capability.records]

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return causes(self.records)

    @property
    def evidence(self) -> list[dict[str, str]]:
        return list({frozenset(r.evidence.items()): r.evidence for r in self.records if r.evidence}.values())

    @property
    def outcome(self) -> BackendOutcome:
        """Unavailable, or the worst of the capabilities that apply."""
        if self.reasons:
            return BackendOutcome.UNAVAILABLE
        outcomes = {capability.outcome for capability in self.capabilities}
        if any(pairs.not_judged for pairs in self.pairs.values()):
            outcomes.add(BackendOutcome.NOT_RUN)
        for decisive in (BackendOutcome.FAIL, BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE, BackendOutcome.PASS):
            if decisive in outcomes:
                return decisive
        return BackendOutcome.UNSUPPORTED


@dataclass(frozen=True)
class RunSummary:
    environment: dict[str, str]  # device, versions and suite, as the header shows them
    backends: tuple[BackendSummary, ...]  # one entry per backend of the run
    cases: tuple[str, ...] = ()  # ids of the whole case list, of all shards
    shard: Shard | None = None  # which part of the list this run was to judge; None for all of it
    deployment: Deployment | None = None  # the model that the cases are of, if they are
    source: str = ""  # the report that it was read from, for messages
    date: str = ""  # ISO date on which it ended, or empty if the report does not tell
    # SHA-256, by place, of the modules that its backends loaded and no wheel holds
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return [record for backend in self.backends for record in backend.records]

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(cause for backend in self.backends for cause in backend.causes)

    @property
    def counts(self) -> Counts:
        return sum((backend.counts for backend in self.backends), Counts())

    @property
    def judged_cases(self) -> tuple[str, ...]:
        return self.shard.cases if self.shard else self.cases

    def keys_of(self, backend: BackendSummary) -> tuple[str, ...]:
        """Keys of the records that a backend has if every case of the list was judged, in all shards."""
        drawn = any(capability.name == EXPLORED for capability in backend.capabilities)
        return (*self.cases, *backend.facts.fitted, *([EXPLORED] if drawn else []))

    @property
    def seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for record in self.records:
            total[record.case] = total.get(record.case, 0.0) + record.seconds
        return total

    @property
    def exit_status(self) -> int:
        """0: all judged capabilities hold; 1: one failed; 3: nothing could be judged, or the run is incomplete."""
        outcomes = {backend.outcome for backend in self.backends if not backend.reasons}
        if BackendOutcome.FAIL in outcomes:
            return 1
        is_whole = outcomes.isdisjoint({BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE})
        return 0 if BackendOutcome.PASS in outcomes and is_whole else 3


def worst(shares: Iterable[float]) -> float:
    """The largest share of an error budget; NaN is worse than any number."""
    return max(shares, key=lambda share: (math.isnan(share), share), default=0.0)


def count_by_capability(cases: Iterable[str]) -> dict[str, int]:
    return dict(Counter(case.partition(":")[0] for case in cases))


def summarise(records: Iterable[Record], listed: dict[str, int]) -> tuple[CapabilitySummary, ...]:
    """Group the records of one backend; ``listed`` gives the cases of each selected capability."""
    groups: dict[str, list[Record]] = {name: [] for name in listed}
    for record in records:
        groups.setdefault(record.capability, []).append(record)
    return tuple(CapabilitySummary(name, listed.get(name, 0), tuple(group)) for name, group in groups.items())


def is_right(backend: BackendSummary, by_default: bool) -> bool:
    """Whether a backend is timed: something passed and nothing failed; an emulation if it was named."""
    held = backend.outcome is BackendOutcome.PASS and not backend.counts.waived
    return held and not (by_default and backend.facts.emulated)
