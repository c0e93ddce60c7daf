"""How good the diagnosis is: ``python ci/diagnosis.py`` tries it on every known defect and writes what came of it.

Known defects are failing backends, with themselves among the candidates, without, and mixed. Mixed are two defects in
one kernel, and a defect of one head or of one request beside an honest rest. A cause that is told is right if it is the
defect's own, one of the two, or gives the same numbers to the last one; of a defect that is left out, one of its
family. One head or request alone is no kernel that could be tried on cases nearby.

The outcome goes into ``ci/diagnosis.json``, its sentence into ``docs/known-defects.md``; the exit status is 1 for a
confident error.
"""

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache, partial
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import LayeredDecode
from mla_conformance.defects.known import Emulation, KnownDefect, known_defects
from mla_conformance.defects.report import stored as stored_kills
from mla_conformance.diagnosis.attempts import attempted
from mla_conformance.diagnosis.candidates import Candidate, candidates, combined
from mla_conformance.diagnosis.explain import ALIKE, MOST_TOLD, causes_of
from mla_conformance.diagnosis.likeness import Behaviour, likeness, numbers_of
from mla_conformance.diagnosis.neighbours import holding, outcome
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.files.outputs import Section
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import COMPARED
from mla_conformance.problems.operands import segments
from mla_conformance.report.json_report import write_json
from mla_conformance.trials.context import Context
from mla_conformance.trials.trial import Trial
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

ROOT = Path(__file__).parents[1]
STORED, PAGE = ROOT / "ci" / "diagnosis.json", ROOT / "docs" / "known-defects.md"
_MAPS = ("heat.py", "heat_map.py")
"""The only files of the room that tell nothing of causes."""
_Mixture = tuple[tuple[KnownDefect, ...], str, Behaviour, str]
"""The defects that are wholly in a kernel, the kind of mixture, what it does, and what loads it, if there is one."""
_MIXTURES = 4
"""Mixtures of a defect at most."""
_WORKERS = 2
_NEARBY = Context()
"""Cases nearby are shared by the defects of a capability."""


class Outcome(StrEnum):
    """What came of a diagnosis."""

    RIGHT = "right"
    WRONG = "wrong with confidence"
    UNSURE = "wrong after a 'perhaps'"
    SILENT = "nothing told"
    SAID = "no wrong number"
    """An exception, a wrong shape or a side effect, which the failure's message says itself."""

    @staticmethod
    def of(reported: bool, right: bool, certain: bool) -> "Outcome":
        """Of what was told with or without a "perhaps"."""
        if not reported:
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
        """Diagnoses that were wrong with confidence."""
        return sum(self.number(kind, Outcome.WRONG) for kind in self.counts)


def digest() -> str:
    """Of the candidates that are no known defects, and of the rule."""
    folder = Path(str(files("mla_conformance.diagnosis")))
    return meaning_digest(path for path in folder.glob("*.py") if path.name not in _MAPS)[:16]


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
    return DiagnosisReport(**json.loads(STORED.read_text(encoding="utf-8")))


def calibrate() -> list[Diagnosis]:
    """Every diagnosis of known defects and of mixtures, by cases in processes of their own."""
    groups: dict[str, list[str]] = defaultdict(list)
    known = stored_kills().killing_cases
    for entry in known_defects().values():
        groups[known.get(entry.id) or _killing_case(entry)].append(entry.id)
    with ProcessPoolExecutor(_WORKERS, get_context("spawn"), initializer=partial(torch.set_num_threads, 1)) as pool:
        return [found for part in pool.map(diagnoses, groups, groups.values()) for found in part]


def _killing_case(entry: KnownDefect) -> str:
    """The first case of the expected capability that kills a defect."""
    context = Context()
    cases = (case for case in CAPABILITIES[entry.killed_by].select(Tier.FULL) if case.role in entry.roles)
    return next(case.id for case in cases if _tried(entry.reference, case, context)[1].failed)


def diagnoses(text: str, ids: Sequence[str]) -> list[Diagnosis]:
    """Of the defects that a case kills first."""
    return list(_OnCase(Case.parse(text)).diagnoses([known_defects()[id] for id in ids]))


def _tried(reference: str, case: Case, context: Context) -> tuple[Trial, Record]:
    return attempted(reference, case, context, torch.device("cpu"))


@cache
def _outcome(reference: str, case: Case) -> str | None:
    return outcome(_tried(reference, case, _NEARBY)[1])


def _outcome_of(candidate: Candidate, case: Case) -> str | None:
    return _outcome(candidate.reference, case)


class _OnCase:
    """One case, with what every candidate does on it."""

    def __init__(self, case: Case) -> None:
        self._case, self._context = case, Context()
        self._behaviours: dict[str, Behaviour] = {}
        self._random = random.Random(case.id)

    def diagnoses(self, entries: Sequence[KnownDefect]) -> Iterator[Diagnosis]:
        for entry in entries:
            trial, record = _tried(entry.reference, self._case, self._context)
            if record.check not in COMPARED:
                yield Diagnosis(entry.id, "alone", Outcome.SAID)
                continue
            own = Behaviour.of(trial, record)
            yield self._diagnosis(entry.id, "alone", own, entry.reference, partial(_is_own, (entry,)))
            of_family = partial(_is_related, entry)
            yield self._diagnosis(entry.id, "left out", own, entry.reference, of_family, left_out=entry.id)
            for defects, kind, mixed, reference in self._mixtures(entry, trial, own):
                yield self._diagnosis(entry.id, kind, mixed, reference, partial(_is_own, defects))

    def _diagnosis(
        self,
        name: str,
        kind: str,
        seen: Behaviour,
        reference: str,
        is_right: Callable[[Candidate], bool],
        left_out: str = "",
    ) -> Diagnosis:
        """What is told of a behaviour; ``is_right`` says so of a cause besides giving the same numbers."""
        found: list[Candidate] = []
        rejected, accepted = 0.0, 1.0
        for candidate in candidates(self._case.role):
            if candidate.id == left_out != "":
                continue
            share = likeness(seen, self._behaviour(candidate.reference))
            if share >= ALIKE:
                found.append(candidate)
                accepted = min(accepted, share)
            else:
                rejected = max(rejected, share)
        observed = partial(_outcome, reference)
        held = holding(found, self._case, observed, _outcome_of) if reference else found
        causes = causes_of(held or found)
        reported = causes if len(causes) <= MOST_TOLD else []
        right = any(is_right(each) or (not left_out and self._is_same(seen, each)) for each in reported)
        told = Outcome.of(bool(reported), right, seen.is_numeric and bool(held))
        return Diagnosis(name, kind, told, rejected, accepted)

    def _is_same(self, seen: Behaviour, candidate: Candidate) -> bool:
        return likeness(seen, self._behaviour(candidate.reference)) == 1.0

    def _behaviour(self, reference: str) -> Behaviour:
        if reference not in self._behaviours:
            self._behaviours[reference] = Behaviour.of(*_tried(reference, self._case, self._context))
        return self._behaviours[reference]

    def _mixtures(self, entry: KnownDefect, trial: Trial, own: Behaviour) -> Iterator[_Mixture]:
        """A few that fail; of attention also where one head or request alone is wrong."""
        for other in self._random.sample(list(known_defects().values()), _MIXTURES):
            kernel = _both(entry.kernel, other.kernel)
            if kernel and self._case.role in other.roles:
                made, record = _tried(_located(kernel), self._case, self._context)
                if record.check in COMPARED:
                    yield (entry, other), "two at once", Behaviour.of(made, record), _located(kernel)
        if self._case.role not in _HONEST:
            return
        honest, _ = _tried(_located(_HONEST[self._case.role]), self._case, self._context)
        if trial.last and honest.last and honest.last.problem.key == trial.last.problem.key:
            yield from (((), *blend, "") for blend in _blends(own, numbers_of(honest), trial))


def _is_own(entries: Sequence[KnownDefect], reported: Candidate) -> bool:
    return any(entry.id in (reported.id, *reported.covers) for entry in entries)


def _is_related(entry: KnownDefect, reported: Candidate) -> bool:
    return reported.family == entry.family or entry.id in reported.covers


_HONEST: dict[Role, type[Emulation]] = {
    Role.PREFILL: EagerPrefillBackend,
    Role.DECODE: LayeredDecode,
    Role.LAYER: LayeredDecode,
    Role.SPARSE: EagerSparseBackend,
}


def _located(kernel: type) -> str:
    return f"{kernel.__module__}:{kernel.__name__}"


def _both(one: type[Emulation], other: type[Emulation]) -> type[Emulation] | None:
    """A kernel with two defects; None if they do not combine."""
    if one is other or issubclass(one, other) or issubclass(other, one):
        return None
    try:
        return combined(one, other)
    except TypeError:
        return None


def _blends(own: Behaviour, honest: Sequence[Measured], trial: Trial) -> Iterator[tuple[str, Behaviour]]:
    """The defect in the first head only, and in the last request only, where something is wrong there."""
    assert trial.last is not None
    last = list(segments(trial.last.expectation.rows.start_loc))[-1]
    for kind, rows, heads in (("one head", slice(None), slice(0, 1)), ("one request", last, slice(None))):
        pairs = zip(own.numbers, honest, strict=False)
        mixed = replace(own, numbers=tuple(_blend(wrong, right, rows, heads) for wrong, right in pairs))
        if len(own.numbers) == len(honest) and mixed.is_wrong:
            yield kind, mixed


def _blend(wrong: Measured, right: Measured, rows: slice, heads: slice) -> Measured:
    """The wrong numbers of these rows and heads among right ones; outputs are [T, N, V], LSEs [N, T]."""
    place = (rows, heads) if wrong.got.dim() == 3 else (heads, rows)
    got, allowed = right.got.clone(), right.allowed.clone()
    got[place], allowed[place] = wrong.got[place], wrong.allowed[place]
    return replace(wrong, got=got, allowed=allowed)


def main() -> int:
    """Diagnose every known defect, say and write how that went; the exit status."""
    page, deciding = Section.of(PAGE, "diagnosis"), digest()  # of what the run begins with
    report = DiagnosisReport.of(calibrate(), deciding)
    write_json(STORED, asdict(report))
    page.write(f"{sentence(report)} (`python ci/diagnosis.py`).")
    sys.stdout.writelines(f"{line}\n" for line in terminal_lines(report))
    return 1 if report.confident_errors else 0


if __name__ == "__main__":
    sys.exit(main())
