"""The outcome of a run as one HTML page that needs no network, no script and no other file."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.answers import answers
from mla_conformance.report.causes import grouped
from mla_conformance.report.outcome import cases_of, closing_line, from_here, judged_of_claimed
from mla_conformance.report.pages import VIEW, cell, definition, picture, render, words
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
    named = [{each.name: each for each in backend.capabilities} for backend in run_backends]
    matrix = []  # a cell for each backend that was asked, and where its failures stand, if it has any
    for name in names:
        selected = [(backend, own.get(name)) for backend, own in zip(run_backends, named, strict=True)]
        cells = [each and (cell(each), shown(f"{b.name}-{name}") if each.failures else "") for b, each in selected]
        matrix.append((name, definition(name), cells))
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
        matrix=matrix,
        budget=[(backend, distributions(backend)) for backend in run_backends],
        closest=closest(run_backends),
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


RULES = {"element": "each element", "row": "each row", "lse": "each LSE"}
BINS = 20


class Distribution(NamedTuple):
    title: str  # of the rule
    words: str
    bins: list[int]  # passed cases that the rule applied to, by the 20th part of its limit that they used


def distributions(backend: BackendSummary) -> list[Distribution]:
    used, found = [record.shares for record in backend.records if record.status is Status.PASS], list[Distribution]()
    for rule, title in RULES.items():
        if shares := [share[rule] for share in used if share.get(rule)]:
            said = f"{len(shares)} cases, median {statistics.median(shares):.2f}, largest {max(shares):.2f}"
            counts = Counter(min(int(share * BINS), BINS - 1) for share in shares)
            found.append(Distribution(title, said, [counts[number] for number in range(BINS)]))
    return found


class Closest(NamedTuple):
    """A pass near the limit: the rule that it used most of, and the share."""

    record: Record
    rule: str
    share: float


def closest(backends: Sequence[BackendSummary]) -> list[Closest]:
    passes = (r for backend in backends for r in backend.records if r.status is Status.PASS and any(r.shares.values()))
    found = [Closest(record, *max(record.shares.items(), key=lambda item: item[1])) for record in passes]
    return sorted(found, key=lambda case: -case.share)[:_CLOSEST]
