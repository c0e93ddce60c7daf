"""The scoreboard as one HTML page that needs no network and no other file."""

from dataclasses import replace

from mla_conformance.judging.record import replay_line
from mla_conformance.report.pages import Cell, cell, definition, render
from mla_conformance.report.summary import CapabilitySummary, Outcome
from mla_conformance.report.terminal import SIGN, counted
from mla_conformance.scoreboard.board import Board, is_own_build
from mla_conformance.scoreboard.entry import Entry
from mla_conformance.scoreboard.profiles import Candidate, Profile
from mla_conformance.version import SUITE_VERSION


def page(board: Board) -> str:
    """The page."""
    anchors = {id(entry): f"kernel-{number}" for number, entry in enumerate(board.newest, start=1)}
    return render(
        "mla_conformance.scoreboard",
        "board.html.j2",
        board=board,
        suite=SUITE_VERSION,
        style=_style,
        cell=_cell,
        definition=definition,
        build=_build,
        anchor=lambda entry: anchors[id(entry)],
        replay=_replay,
        counted=counted,
    )


def _style(entry: Entry) -> tuple[str, str]:
    """The class and the sign of a verdict."""
    if not entry.counts.judged:
        return "unsupported", "–"
    return ("fail", "✘") if entry.is_wrong else ("pass", "✔")


def _cell(capability: CapabilitySummary) -> Cell:
    """A cell in which a known failure is one: an expectation excuses it in a run, and makes no kernel right."""
    found, waived = cell(capability), capability.counts.waived
    return replace(found, style="fail", sign=SIGN[Outcome.FAIL], note=f"{waived} known to fail") if waived else found


def _replay(entry: Entry, case: str) -> str:
    return replay_line(case, entry.record.reference, salt=entry.record.environment.get("salt", ""))


def _build(profile: Profile, candidate: Candidate, entry: Entry) -> str:
    """Of which build the record is, beside the engine's own, and under which torch."""
    torch = entry.record.environment.get("torch", "not stated")
    told = ", ".join(f"{name} {version}" for name, version in candidate.packages.items())
    own = f"the engine's own build ({told})" if is_own_build(entry, candidate) else f"another build ({entry.versions})"
    same = torch.partition("+")[0] == profile.torch
    return own if same else f"{own}, judged with torch {torch}; the engine asks for {profile.torch}"
