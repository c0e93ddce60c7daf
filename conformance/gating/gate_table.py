"""The gate's outcome as a short table."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from mla_conformance.gating.gate import Gate
from mla_conformance.gating.row import Row
from mla_conformance.report.shown import cut
from mla_conformance.report.terminal import counted

_SHOWN = 20


def gate_lines(gate: Gate, rows: Sequence[Row], blocked: bool) -> Iterator[str]:
    """One line per finding, the first of each kind, what the others are about, and the decision with its terms."""
    width = max((len(row.backend) for row in rows), default=0)
    for finding, group in groupby(rows, key=lambda row: row.finding):
        of_kind = list(group)
        for row in of_kind[:_SHOWN]:
            yield f"{finding:<16} {row.backend:<{width}} {cut(row.what)} · {cut(row.detail)}"
        if hidden := of_kind[_SHOWN:]:
            yield f"{finding:<16} … and {len(hidden)} more: {cut(', '.join(row.what for row in hidden))}"
    yield f"gate {'CLOSED' if blocked else 'open'} · " + " · ".join([*gate.terms, *_counts(gate, rows)])


def _counts(gate: Gate, rows: Sequence[Row]) -> Iterator[str]:
    """Verdicts, and how many of them are expected failures; then cases by finding."""
    yield counted(sum(len(report.records) for report in gate.reports), "verdict")
    if waived := gate.now.counts.waived:
        yield counted(waived, "expected failure")
    for finding, group in groupby(rows, key=lambda row: row.finding):
        yield f"{sum(row.cases for row in group)} {finding}"
