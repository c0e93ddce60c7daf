"""The outcome of a run as one HTML page that needs no network, no script and no other file."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.answers import answers
from mla_conformance.report.causes import grouped
from mla_conformance.report.outcome import cases_of, closing_line, from_here, judged_of_claimed
from mla_conformance.report.pages import VIEW, Cell, cell, definition, picture, render, words
from mla_conformance.report.pairs import right_on
from mla_conformance.report.summary import SIGN, BackendOutcome, BackendSummary, RunSummary
from mla_conformance.report.terminal import counted, shown
from mla_conformance.speed.times import remarks_of

_CLOSEST = 8


def html(run: RunSummary) -> str:
    run_backends = [backend for backend in run.backends if not backend.reasons]
    expected = (record for record in run.records if record.status is Status.EXPECTED_FAILURE)
    waived = grouped(expected, lambda record: (record.backend, record.expectation))
    names = list(dict.fromkeys(c.name for backend in run_backends for c in backend.capabilities))
    refusals = []  # why cases are unsupported, the reason for most first: said, how many cases, of which capabilities
    for backend in run_backends:
        refused = (record for record in backend.records if record.status is Status.UNSUPPORTED)
        rows = [
            (reason, len(records), ", ".join(dict.fromkeys(record.capability for record in records)))
            for reason, records in grouped(refused, lambda record: record.message).items()
        ]
        refusals += [(backend, sorted(rows, key=lambda row: -row[1]))] if rows else []
    return render(
        "mla_conformance.report",
        "page.html.j2",
        run=run,
        outcome={0: "pass", 1: "fail"}.get(run.exit_status, "not_run"),
        closing=closing_line(run),
        judged_backends=run_backends,
        traits_of=[(backend.name, backend.traits) for backend in run_backends],
        traits_view=VIEW,
        timed=[(backend.name, backend.speed) for backend in run_backends if backend.speed],
        remarks_of=remarks_of,
        waived=[(reason, records) for (_, reason), records in waived.items()],
        judged_of_claimed=judged_of_claimed,
        verdicts=[(backend, SIGN[backend.outcome], _verdict(backend)) for backend in run.backends],
        seconds=f"{sum(run.seconds.values()):.0f} s",
        refusals=refusals,
        deployment=str(run.deployment or ""),
        answers=answers(run) if run.deployment else [],
        unavailable=[backend for backend in run.backends if backend.reasons],
        matrix=[(name, definition(name), [_placed(backend, name) for backend in run_backends]) for name in names],
        budget=[(backend, distributions(backend)) for backend in run_backends],
        closest=closest(run_backends, _CLOSEST),
        anchor=lambda backend, capability: shown(f"{backend}-{capability}"),
        replay=lambda record: from_here(record).replay,
        picture=picture,
        words=words,
        counted=counted,
        cases_of=cases_of,
    )


def _verdict(backend: BackendSummary) -> str:
    """What is said of a backend in one sentence, with the likely cause of its failures, or what is seen of most."""
    counts = backend.counts
    if backend.causes:
        first, *others = backend.causes
        part = f", {len(first.failures)} of them" if others else ""
        if first.kind == "likely":
            part = f"{part or ','} most likely because"
        likely = sum(cause.kind == "likely" for cause in others)
        more = f"; {counted(likely, 'other likely cause')}" if likely else ""
        return f"{counted(counts.failed, 'case')} wrong{part}: {first.sentence}{more}"
    if backend.reasons or backend.not_run:
        return "; ".join(backend.reasons) or backend.not_run
    if backend.outcome is not BackendOutcome.PASS:
        return "nothing was judged"
    if not counts.waived:
        return f"right: {right_on(backend.records)}"
    rest = counts.noted(unsupported="unsupported", unavailable="unavailable")
    return "; ".join([f"wrong, as expected, on {counts.waived:,} of {counted(counts.verdicts, 'case')}", *rest])


def _placed(backend: BackendSummary, name: str) -> tuple[Cell, str] | None:
    """A cell of the matrix and where its failures stand, if it has any; None for a capability that was not selected."""
    capability = next((c for c in backend.capabilities if c.name == name), None)
    if capability is None:
        return None
    return cell(capability), shown(f"{backend.name}-{name}") if capability.failures else ""


RULES = {"element": "each element", "row": "each row", "lse": "each LSE"}
BINS = 20


@dataclass(frozen=True)
class Distribution:
    rule: str  # a key of :data:`RULES`
    shares: tuple[float, ...]  # one per passed case that the rule applied to; 1 is the limit

    @cached_property
    def bins(self) -> list[int]:
        counts = Counter(min(int(share * BINS), BINS - 1) for share in self.shares)
        return [counts[number] for number in range(BINS)]

    @property
    def title(self) -> str:
        return RULES.get(self.rule, self.rule)

    @property
    def words(self) -> str:
        return f"{len(self.shares)} cases, median {statistics.median(self.shares):.2f}, largest {max(self.shares):.2f}"


def distributions(backend: BackendSummary) -> list[Distribution]:
    used = [record.shares for record in backend.records if record.status is Status.PASS]
    shares = {rule: tuple(share[rule] for share in used if share.get(rule)) for rule in RULES}
    return [Distribution(rule, found) for rule, found in shares.items() if found]


@dataclass(frozen=True)
class Closest:
    """A pass near the limit: the rule that it used most of, and the share."""

    record: Record
    rule: str
    share: float


def closest(backends: Sequence[BackendSummary], count: int) -> list[Closest]:
    passes = (r for backend in backends for r in backend.records if r.status is Status.PASS and any(r.shares.values()))
    found = [Closest(record, *max(record.shares.items(), key=lambda item: item[1])) for record in passes]
    return sorted(found, key=lambda case: -case.share)[:count]
