"""The outcome of a run, counted with the denominator, and how much "right" is said of. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.backends.roles import Role
from mla_conformance.cases import cached, covering, sharding
from mla_conformance.cases.case import Case
from mla_conformance.cases.space import Row
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import EXPLORED, FAILED, NOTHING_TRACED, BackendFacts, Record, Status, Traced
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.models.profile import Deployment
from mla_conformance.report.causes import Cause, causes, grouped
from mla_conformance.speed.times import Speed
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import DUE_ON_GPU, counts

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
            name = _NAMES.get(record.status, str(record.status))
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


_NAMES = {Status.PASS: "passed", Status.EXPECTED_FAILURE: "waived", **dict.fromkeys(FAILED, "failed")}


class BackendOutcome(StrEnum):
    """Status of a capability or a backend."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    NOT_RUN = "not_run"


SIGN = dict(zip(BackendOutcome, "✔✘–??", strict=True))
FORESEEN = "!"  # the sign of what failed as an expectation says


class Group(StrEnum):
    """What a backend is for a deployed model, in the order in which it is told."""

    RIGHT = "right"
    EMULATED = "right, but emulated, which is no evidence"
    WRONG = "wrong"
    WAIVED = "wrong, as an expectation says"
    INCOMPLETE = "incomplete"
    REFUSED = "unsupported"
    UNTESTED = "untested"


_GROUPS = {BackendOutcome.FAIL: Group.WRONG, BackendOutcome.UNSUPPORTED: Group.REFUSED}
_GROUPS |= dict.fromkeys((BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE), Group.INCOMPLETE)
_DECISIVE = (BackendOutcome.FAIL, BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE, BackendOutcome.PASS)


@dataclass
class CapabilitySummary:
    name: str  # the capability
    listed: int  # cases that the run's list holds for it; drawn ones are not among them
    records: tuple[Record, ...]  # what was run

    def __post_init__(self) -> None:
        # What is too large for the device by the suite's own estimate takes nothing from the rest.
        counts = self.counts = Counts.of(self.records, self.listed)
        self.failures = tuple(record for record in self.records if record.failed)  # for a fault of the harness as well
        unjudged, held = any(record.is_unjudged for record in self.records), counts.passed or counts.waived
        found = zip(_DECISIVE, (counts.failed, counts.not_run, unjudged, held), strict=True)
        rest = BackendOutcome.UNAVAILABLE if counts.unavailable else BackendOutcome.UNSUPPORTED
        self.outcome = next((outcome for outcome, holds in found if holds), rest)
        # What fails as expected does not hold.
        self.sign = FORESEEN if self.outcome is BackendOutcome.PASS and counts.waived else SIGN[self.outcome]


@dataclass
class BackendSummary:
    facts: BackendFacts  # what it is here
    capabilities: tuple[CapabilitySummary, ...] = ()  # one entry per selected capability; none if it is unavailable
    stopped: str = ""  # why the rest of its cases was not run, or empty
    traced: Traced = NOTHING_TRACED  # what was seen to run
    # where the errors of a failure are, by case, of those that were explained
    heat: Mapping[str, HeatMap] = field(default_factory=dict)
    # by role, the pairs of classes that were claimed and judged, where the covering arrays were asked
    pairs: Mapping[str, "JudgedPairs"] = field(default_factory=dict)
    traits: Traits = NO_TRAITS  # what was found beside verdicts, where that was asked for
    speed: Speed | None = None  # its times, if it is right and was timed

    def __post_init__(self) -> None:
        self.name, self.reasons = self.facts.name, self.facts.reasons  # why it is unavailable; empty if it was run
        self.records = [record for capability in self.capabilities for record in capability.records]
        counts = self.counts = sum((capability.counts for capability in self.capabilities), Counts())
        # The largest share of its error budget that a passed case used.
        self.worst = worst(x for r in self.records if r.status is Status.PASS for x in r.shares.values())
        why = f": {self.stopped}" if self.stopped else ""
        self.not_run = f"{counts.not_run} NOT RUN{why}" if counts.not_run else ""
        # What the library says of its kernels, each once.
        self.evidence = list({frozenset(r.evidence.items()): r.evidence for r in self.records if r.evidence}.values())
        # Unavailable, or the worst of the capabilities that apply.
        outcomes = {capability.outcome for capability in self.capabilities}
        if any(pairs.not_judged for pairs in self.pairs.values()):
            outcomes.add(BackendOutcome.NOT_RUN)
        found = next((outcome for outcome in _DECISIVE if outcome in outcomes), BackendOutcome.UNSUPPORTED)
        # To refuse what it must is no computation: of a backend that declares all else unsupported nothing was judged.
        self.only_refuses = bool(counts.passed) and not (counts.waived or any(each.computed for each in self.records))
        if found is BackendOutcome.PASS and self.only_refuses and counts.unsupported:
            found = BackendOutcome.UNSUPPORTED
        self.outcome = BackendOutcome.UNAVAILABLE if self.reasons else found
        is_waived = self.outcome is BackendOutcome.PASS and counts.waived
        self.sign = FORESEEN if is_waived else SIGN[self.outcome]
        # For a deployed model it is right only if something was judged and all of that held.
        right = Group.EMULATED if self.facts.emulated else Group.RIGHT
        self.group = Group.WAIVED if is_waived else _GROUPS.get(self.outcome, right)
        # What failed in the suite itself is no fault of the kernel's.
        blamed = any(record.failed and record.status is not Status.HARNESS_ERROR for record in self.records)
        if self.group is Group.WRONG and not blamed:
            self.group, self.sign = Group.INCOMPLETE, SIGN[BackendOutcome.UNAVAILABLE]
        if self.reasons or not self.capabilities:
            self.group = Group.UNTESTED if self.reasons else Group.INCOMPLETE

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return causes(self.records)


@dataclass
class RunSummary:
    environment: dict[str, str]  # device, versions and suite, as the header shows them
    backends: tuple[BackendSummary, ...]  # one entry per backend of the run
    cases: tuple[str, ...] = ()  # ids of the whole case list, of all shards
    shard: sharding.Shard | None = None  # which part of the list this run was to judge; None for all of it
    deployment: Deployment | None = None  # the model that the cases are of, if they are
    source: str = ""  # the report that it was read from, for messages
    date: str = ""  # ISO date on which it ended, or empty if the report does not tell
    # SHA-256, by place, of the modules that its backends loaded and no wheel holds
    code: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = [record for backend in self.backends for record in backend.records]
        self.counts = sum((backend.counts for backend in self.backends), Counts())
        self.judged_cases = self.shard.cases if self.shard else self.cases
        outcomes = {backend.outcome for backend in self.backends if not backend.reasons}
        is_whole = outcomes.isdisjoint({BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE})
        # 0: all judged capabilities hold; 1: one failed; 3: nothing could be judged, or the run is incomplete
        self.exit_status = 0 if BackendOutcome.PASS in outcomes and is_whole else 3
        if BackendOutcome.FAIL in outcomes:
            self.exit_status = 1

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(cause for backend in self.backends for cause in backend.causes)

    def keys_of(self, backend: BackendSummary) -> tuple[str, ...]:
        """Keys of the records that a backend has if every case of the list was judged, in all shards."""
        drawn = any(capability.name == EXPLORED for capability in backend.capabilities)
        return (*self.cases, *backend.facts.fitted, *([EXPLORED] if drawn else []))

    @property
    def seconds(self) -> dict[str, float]:
        by_case = grouped(self.records, lambda record: record.case)
        return {case: sum(record.seconds for record in records) for case, records in by_case.items()}


def worst(shares: Iterable[float]) -> float:
    """The largest share of an error budget; NaN is worse than any number."""
    return max(shares, key=lambda share: (math.isnan(share), share), default=0.0)


def summarise(records: Iterable[Record], cases: Iterable[str] = ()) -> tuple[CapabilitySummary, ...]:
    """Group the records of one backend, which was to be judged on these ``cases``."""
    listed = Counter(case.partition(":")[0] for case in cases)
    groups: dict[str, list[Record]] = {name: [] for name in listed}
    groups |= grouped(records, lambda record: record.capability)
    return tuple(CapabilitySummary(name, listed[name], tuple(group)) for name, group in groups.items())


class JudgedPairs(Struct, frozen=True, forbid_unknown_fields=True):
    """Pairs of classes of a role's space."""

    claimed: Annotated[Number, Meta(description="Of what the backend declares.")]
    judged: Number
    # each as ``dimension=class · dimension=class``
    not_judged: Annotated[tuple[str, ...], Meta(description="Those that were claimed and not judged.")]

    def __str__(self) -> str:
        return f"pairs of classes claimed {self.claimed:,}, judged {self.judged:,}"


def judged_pairs(records: Iterable[Record], fitted: Sequence[str]) -> dict[str, JudgedPairs]:
    """By role; nothing of roles whose covering array was not asked, or of which nothing is declared."""
    by_role: dict[str, list[tuple[Sequence[Row], Status]]] = {space.role: [] for space in SPACES.values()}
    counted = [record for record in records if record.capability != EXPLORED and counts(record.capability)]
    arrays = {record.capability for record in counted}
    for record in counted:
        if record.status is not Status.UNSUPPORTED:  # most are, and to parse a case takes longer than all else here
            role, held = _placed(record.case)
            by_role[role].append((held, record.status))
    rows, found = [_placed(case) for case in fitted if counts(case.partition(":")[0])], {}
    for space in (space for name, space in SPACES.items() if name in arrays):
        declared, without = by_role[space.role], (Status.UNAVAILABLE, Status.HARNESS_ERROR)
        judged = covering.Pairs(space, (row for held, status in declared if status not in without for row in held))
        of_cases = (*(held for held, _ in declared), *(held for role, held in rows if role is space.role))
        if every := covering.Pairs(space, chain.from_iterable(of_cases)):
            left = tuple(" · ".join(map("=".join, pair)) for pair in every - judged)
            found[str(space.role)] = JudgedPairs(len(every), len(judged), left)
    return found


@lru_cache(maxsize=2**14)
def _placed(case_id: str) -> tuple[Role, Sequence[Row]]:
    """The role of a case and the classes that it holds, which are asked for again with each backend and each report."""
    case = Case.parse(case_id)
    space = next(space for space in SPACES.values() if space.role is case.role)
    return case.role, tuple(space.rows((case,)))


def total(pairs: Mapping[str, JudgedPairs]) -> JudgedPairs:
    """Over all roles; each pair that was not judged stands behind its role."""
    missing = tuple(f"{role} {pair}" for role, each in pairs.items() for pair in each.not_judged)
    claimed, judged = (sum(getattr(each, name) for each in pairs.values()) for name in ("claimed", "judged"))
    return JudgedPairs(claimed, judged, missing)


OTHER_ROLE = "other"  # of an id that an older suite wrote in another way, nothing is known


def right_on(records: Iterable[Record]) -> str:
    """On which cases a kernel is right, role by role; those of roles of which nothing was judged are counted apart."""
    by_role: dict[str, Counter[str]] = {}
    pages, others = set[int](), 0
    for record in records:
        role, page = role_and_page(record.case)
        due = record.status is Status.UNSUPPORTED and record.message.startswith(DUE_ON_GPU)
        by_role.setdefault(role, Counter())[DUE_ON_GPU if due else record.status] += record.cases
        pages |= {page} if page and record.status is Status.PASS else set()
    said = []
    for role, found in by_role.items():
        passed, listed = found.pop(Status.PASS, 0), found.total()
        if not passed:
            others += listed
            continue
        rest = f" ({', '.join(f'{number:,} {why}' for why, number in found.items())})" if found else ""
        said.append(f"{f'{passed:,} of {passed + listed:,}' if found else f'all {passed:,}'} {role} cases{rest}")
    said += [f"page {page} only" for page in pages if len(pages) == 1]
    return ", ".join(said) + (f"; {others:,} of other roles do not apply" if others and said else "")


@lru_cache(8192)
def role_and_page(case: str) -> tuple[str, int]:
    """A case's role, and the tokens of a page of its cache, 0 without one."""
    try:
        parsed = Case.parse(case)
    except ValueError:
        return OTHER_ROLE, 0
    return str(parsed.role), parsed.page if isinstance(parsed, cached.CachedCase) else 0
