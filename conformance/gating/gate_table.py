"""The gate's outcome as a short table."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from mla_conformance.gating.gate import Row

_SHOWN = 20


def gate_lines(rows: Sequence[Row], blocked: bool, judged: int) -> Iterator[str]:
    """One line per finding, the first of each kind, and the decision."""
    width = max((len(row.backend) for row in rows), default=0)
    for finding, group in groupby(rows, key=lambda row: row.finding):
        of_kind = list(group)
        for row in of_kind[:_SHOWN]:
            yield f"{finding:<16} {row.backend:<{width}} {row.what} · {row.detail}"
        if len(of_kind) > _SHOWN:
            yield f"{finding:<16} … and {len(of_kind) - _SHOWN} more"
    counts = [f"{len(list(group))} {finding}" for finding, group in groupby(rows, key=lambda row: row.finding)]
    yield f"gate {'CLOSED' if blocked else 'open'} · " + " · ".join([f"{judged} verdicts", *counts])
