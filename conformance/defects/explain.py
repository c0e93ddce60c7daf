"""What a failure looks like: the failed trial beside what every suspect and known defect makes of the same case.

Each of them goes through the same procedure; the one whose result is nearest to the observed one explains it best.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.defects.known import Judged, judged_roles, known_defects
from mla_conformance.defects.suspects import SUSPECTS
from mla_conformance.driving.driver import Observation
from mla_conformance.driving.plain import parts_of, why_not_plain
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.golden import Expectation
from mla_conformance.judging.record import Record
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.trial import Trial

_PATIENCE = 60.0
"""Seconds after which no further candidate is tried."""
_LONG_SECONDS = 5.0
"""A trial that takes longer is not repeated with every candidate; a process's first one loads everything."""
_MOST_REQUESTS = 256
"""The candidates take one request after the other."""
_WORTH_TELLING = 0.8
_INFINITE, _NOT_A_NUMBER = 1e4, 2e4


@dataclass(frozen=True)
class Explanation:
    """A kernel that fails as the observed one does.

    Attributes:
        name: id of a known defect, or the class of a suspect.
        family: the kind of fault.
        sentence: what is wrong with it.
        fit: share of the observed error that it explains; 1 is all of it.
    """

    name: str
    family: str
    sentence: str
    fit: float

    def __str__(self) -> str:
        return f"looks like {self.name} ({self.sentence}): explains {100 * self.fit:.0f} % of the error"


def _candidates(role: Role) -> Iterator[tuple[str, str, type[Judged]]]:
    """Name, family and kernel of everything that serves cases of a role."""
    yield from ((cls.__name__, family, cls) for cls, family in SUSPECTS.items() if role in judged_roles(cls))
    yield from ((entry.id, entry.family, entry.kernel) for entry in known_defects().values() if role in entry.roles)


def explanations(trial: Trial, record: Record) -> list[Explanation]:
    """Every candidate that fails the same check on the same case, best first.

    Args:
        trial: the trial that failed; its last observation is compared.
        record: its record.
    """
    found: list[Explanation] = []
    started = time.monotonic()
    for name, family, cls in _candidates(trial.case.role):
        if time.monotonic() - started > _PATIENCE:
            break
        subject = Subject(BackendReference(name, f"{cls.__module__}:{cls.__name__}"), trial.subject.device)
        other, outcome = judged_trial(subject, trial.case, trial.context)
        if outcome.failed and outcome.check == record.check:
            sentence = (cls.__doc__ or "").strip().rstrip(".")
            found.append(Explanation(name, family, sentence, _fit(trial, other, record, outcome)))
    return sorted(found, key=lambda explanation: -explanation.fit)


def explain(trial: Trial, record: Record) -> str:
    """The best explanation as a sentence, that there is none, or nothing where trying candidates takes too long."""
    if record.seconds > _LONG_SECONDS or len(trial.case.q) > _MOST_REQUESTS:
        return ""
    best = next(iter(explanations(trial, record)), None)
    if best is None or best.fit < _WORTH_TELLING:
        return "unlike every known defect"
    return str(best)


def _fit(trial: Trial, other: Trial, record: Record, outcome: Record) -> float:
    """1 for the same result, 0 for one that is no nearer than the golden one."""
    step = record.message.partition(":")[0] == outcome.message.partition(":")[0]
    if trial.last is None or other.last is None:
        return float(step)
    (expectation, observed), (_, suspected) = trial.last, other.last
    observed_values, suspected_values = _values(observed), _values(suspected)
    if not observed_values or len(observed_values) != len(suspected_values):
        return 0.9 * step + 0.1 * _same_error(observed, suspected)
    golden = _golden(expectation, len(observed_values))
    if [x.shape for x in observed_values] != [x.shape for x in suspected_values]:
        return 0.0
    if golden is None or [x.shape for x in golden] != [x.shape for x in observed_values]:
        golden = [torch.zeros_like(x) for x in observed_values]
    error = _distance(observed_values, golden)
    remaining = _distance(observed_values, suspected_values)
    return max(0.0, 1.0 - remaining / error) if error else float(step and remaining == 0)


def _same_error(a: Observation, b: Observation) -> bool:
    errors = [observation.error.error if observation.error else "" for observation in (a, b)]
    return bool(errors[0]) and errors[0] == errors[1]


def _values(observation: Observation) -> list[torch.Tensor]:
    """Everything the calls of an observation returned, comparable: infinities and NaN are large numbers."""
    if observation.error:
        return []
    returned = [r.out.view if r.out is not None else r.value for r in observation.returned]
    values = [x for value in returned for x in parts_of(value)] + list(observation.merged or ())
    tensors = [value.double() for value in values if not why_not_plain(value)]
    return [x.nan_to_num(nan=_NOT_A_NUMBER, posinf=_INFINITE, neginf=-_INFINITE) for x in tensors]


def _golden(expectation: Expectation, count: int) -> list[torch.Tensor] | None:
    """The golden values in the same order, where they can be lined up."""
    states = [*expectation.calls, *([expectation.merged] if expectation.merged is not None else [])]
    tensors = [x for state in states for x in (state.output, state.lse)]
    if count == 1:
        tensors = tensors[:1]
    return [x.nan_to_num(neginf=-_INFINITE) for x in tensors] if len(tensors) == count else None


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Sum over the tensors of the relative difference, so that output and LSE count alike."""
    parts = ((x - y).norm() / (y.norm() + 1e-9) for x, y in zip(a, b, strict=True))
    return float(sum(parts))
