"""Running a capability's procedure without pytest: for the known defects, for calibration and for diagnosis."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module

from mla_conformance.cases.capabilities import find_capability
from mla_conformance.judging.verdict import Nonconformance, Status, Verdict
from mla_conformance.trials.trial import Trial

_SUITE = ("test_attention", "test_decode", "test_layer", "test_memory", "test_laws", "test_validation", "test_device")

Procedure = Callable[[Trial], None]


@cache
def procedures() -> dict[str, Procedure]:
    """The suite's own test of each capability, by name."""
    return dict(_marked())


def _marked() -> Iterator[tuple[str, Procedure]]:
    for name in _SUITE:
        for test in vars(import_module(f"mla_conformance.suite.{name}")).values():
            for mark in getattr(test, "pytestmark", []):
                if mark.name == "capability":
                    yield mark.args[0], test


def execute(trial: Trial) -> Verdict:
    """Carry out a trial as the suite does and return its verdict; a fault of the harness is raised."""
    try:
        trial.require_role()
        if not find_capability(trial.case.capability).probes_refusals:
            trial.require_support()
        procedures()[trial.case.capability](trial)
    except Nonconformance as outcome:
        return outcome.verdict
    return trial.verdict


def failing(verdict: Verdict) -> bool:
    """Whether a verdict counts against the backend."""
    return verdict.status not in (Status.PASS, Status.UNSUPPORTED, Status.UNAVAILABLE)
