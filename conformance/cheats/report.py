"""What came of all cheats, as data, as lines for a terminal, and as the table of the threat model."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import msgspec

from mla_conformance.cheats.cheat import FAMILIES, Cheat, cheats
from mla_conformance.cheats.trying import Outcome, try_all
from mla_conformance.driving.sources import judging_sources
from mla_conformance.files.inputs import decode
from mla_conformance.files.meaning import meaning_digest

_STORED = "cheats.json"
_THROUGH = "gets through"


class CheatReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a run over all cheats.

    Attributes:
        digest: of everything that decides it.
        outcomes: by name of the cheat.
    """

    digest: str
    outcomes: dict[str, Outcome]

    @property
    def unexpected(self) -> list[str]:
        """Names of the cheats that fare otherwise than their class says, or of which nothing is known."""
        return [
            name
            for name, entry in cheats().items()
            if name not in self.outcomes or not self.outcomes[name].is_of(entry)
        ]


def run_cheats() -> CheatReport:
    """Try them all."""
    digest = deciding_digest()
    return CheatReport(digest, dict(zip(cheats(), try_all(list(cheats().values())), strict=True)))


def deciding_digest() -> str:
    """Digest of the judge, of what carries out a run, and of the cheats."""
    root = Path(str(files("mla_conformance")))
    rooms = [path for room in ("apart", "engine") for path in sorted((root / room).glob("*.py"))]
    own = [root / "cheats" / f"{name}.py" for name in (*FAMILIES, "cheat", "trying")]
    return meaning_digest([*judging_sources(), *rooms, *own])[:16]


def stored() -> CheatReport:
    """The report of the last run that was committed."""
    return decode((files("mla_conformance.fixtures") / _STORED).read_text(encoding="utf-8"), CheatReport, _STORED)


def terminal_lines(report: CheatReport) -> Iterator[str]:
    """A cheat in each line, in one process and apart."""
    for name in cheats():
        found = report.outcomes[name]
        sign = "✘" if name in report.unexpected else "✔"
        yield f"{sign} {name:<26} in one process: {_short(found.alone)} · apart: {_short(found.apart)}"
    yield closing_line(report)


def closing_line(report: CheatReport) -> str:
    """All of them in one line."""
    caught = {way: sum(bool(getattr(found, way)) for found in report.outcomes.values()) for way in ("alone", "apart")}
    total = len(report.outcomes)
    return (
        f"{total} cheats: {caught['alone']} caught in one process, {caught['apart']} apart · "
        f"{len(report.unexpected)} otherwise than expected"
    )


def markdown(report: CheatReport) -> str:
    """The section of the threat model: the table, and why some are not caught."""
    rows = [_row(entry, report.outcomes[name]) for name, entry in cheats().items()]
    head = ["| cheat | attempts | claims | in one process | apart |", "|---|---|---|---|---|"]
    through: dict[str, list[str]] = {}
    for entry in cheats().values():
        if entry.trust:
            through.setdefault(entry.trust, []).append(f"`{entry.name}`")
    reasons = [f"- {', '.join(names)}: {reason}" for reason, names in through.items()]
    return "\n".join([closing_line(report) + ".", "", *head, *rows, "", "Not caught apart, and why:", "", *reasons])


def _row(entry: Cheat, found: Outcome) -> str:
    salted = " (with a salt)" if entry.salted else ""
    cells = (f"`{entry.name}`", entry.attempt, entry.claims, _short(found.alone), _short(found.apart) + salted)
    return f"| {' | '.join(cells)} |"


def _short(said: str) -> str:
    """What a user is told, up to how much of the result is wrong."""
    return f"caught: {said.partition(', wrong in')[0]}" if said else _THROUGH
