"""How good the diagnosis is: of every known defect that was diagnosed, whether what was told is right."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from mla_conformance.files.meaning import meaning_digest

_DECIDING = ("candidates", "explain", "likeness", "suspects", "suspects_prefill", "suspects_decode", "suspects_sparse")


class Outcome(StrEnum):
    """What came of a diagnosis."""

    RIGHT = "right"
    WRONG = "wrong with confidence"
    UNSURE = "wrong after a 'perhaps'"
    SILENT = "nothing told"
    SAID = "no wrong number"
    """An exception, a wrong shape or a side effect, which the failure's message says itself."""

    @staticmethod
    def of(told: bool, right: bool, certain: bool) -> "Outcome":
        """Of what was told with or without a "perhaps"."""
        if not told:
            return Outcome.SILENT
        return Outcome.RIGHT if right else Outcome.WRONG if certain else Outcome.UNSURE


@dataclass(frozen=True)
class Diagnosis:
    """One diagnosis.

    Attributes:
        defect: id of the known defect.
        kind: how it was shown: alone, left out of the candidates, or mixed.
        outcome: what came of it.
        rejected: largest likeness of a candidate that was not taken.
        accepted: least likeness of one that was; 1 if none was.
    """

    defect: str
    kind: str
    outcome: Outcome
    rejected: float = 0.0
    accepted: float = 1.0


@dataclass(frozen=True)
class DiagnosisReport:
    """All of them, counted.

    Attributes:
        digest: of what decides a diagnosis, beside what decides a verdict.
        counts: by kind, how many had which outcome.
        wrong: "kind: defect" of every one that was wrong, with or without confidence.
        rejected: largest likeness of a candidate that was not taken.
        accepted: least likeness of one that was.
    """

    digest: str
    counts: dict[str, dict[str, int]]
    wrong: list[str]
    rejected: float
    accepted: float

    @staticmethod
    def of(found: Iterable[Diagnosis], digest: str) -> "DiagnosisReport":
        """The counts of these; ``digest`` is of when they began."""
        every = list(found)
        counts: dict[str, Counter[str]] = {}
        for each in every:
            kind = each.kind if each.kind in ("alone", "left out") else "mixed"
            counts.setdefault(kind, Counter())[each.outcome.value] += 1
        wrong = [f"{e.kind}: {e.defect} ({e.outcome})" for e in every if e.outcome in (Outcome.WRONG, Outcome.UNSURE)]
        rejected, accepted = max(e.rejected for e in every), min(e.accepted for e in every)
        plain = {kind: dict(count) for kind, count in counts.items()}
        return DiagnosisReport(digest, plain, wrong, rejected, accepted)

    def number(self, kind: str, outcome: Outcome) -> int:
        """How many of a kind had an outcome."""
        return self.counts.get(kind, {}).get(outcome.value, 0)

    @property
    def confident_errors(self) -> int:
        """Diagnoses that were wrong with confidence although the cause was among the candidates.

        Without it another cause may give the same numbers on one case, and nothing tells them apart.
        """
        return self.number("alone", Outcome.WRONG) + self.number("mixed", Outcome.WRONG)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def digest() -> str:
    """Of the candidates that are no known defects, and of the rule."""
    folder = Path(str(files("mla_conformance.defects")))
    return meaning_digest(folder / f"{name}.py" for name in _DECIDING)[:16]


def sentence(report: DiagnosisReport) -> str:
    """The whole calibration in one line."""
    parts = []
    for kind, what in (("alone", "wrong numbers"), ("left out", "with the defect left out"), ("mixed", "mixtures")):
        right, wrong = report.number(kind, Outcome.RIGHT), report.number(kind, Outcome.WRONG)
        judged = sum(report.counts.get(kind, {}).values()) - report.number(kind, Outcome.SAID)
        parts.append(f"{what}: {right} right, {wrong} wrong with confidence of {judged}")
    return f"Diagnosis of known defects · {' · '.join(parts)}"


def terminal_lines(report: DiagnosisReport) -> Iterator[str]:
    """The counts, what was wrong, and how far the threshold lies from both sides."""
    for kind, counts in report.counts.items():
        yield f"{kind:<9} {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
    yield from (f"WRONG {each}" for each in report.wrong)
    yield f"likeness of what was taken: at least {report.accepted:.4f}; of what was not: at most {report.rejected:.4f}"
    yield sentence(report)


def stored() -> DiagnosisReport:
    """The report of the last calibration that was committed."""
    text = (files("mla_conformance.fixtures") / "diagnosis.json").read_text(encoding="utf-8")
    return DiagnosisReport(**json.loads(text))
