"""Where the time of a run of the suite goes, and what the plugin costs a run that does not use it."""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mla_conformance.bench.timing import timed
from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.cases.case import Case
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.golden import forget
from mla_conformance.running.selection import Selection
from mla_conformance.trials import trial as steps
from mla_conformance.trials.execute import execute

_PARTS = {"build_problem": "generation", "expect": "golden", "run_calls": "kernel", "judge": "judge"}
"""Steps of a trial, by the names under which it calls them."""


def split(selection: Selection) -> Iterator[str]:
    """Lines on how long cases take on a backend, in one process, and what of it each step: a tier, or each named case.

    On a GPU a named case is judged before it is measured: what is compiled then is not counted.
    """
    (subject,) = selection.subjects
    if not selection.cases:
        cases = [case for capability in CAPABILITIES.values() for case in capability.select(selection.tier)]
        took = _steps(subject, cases)
        yield f"{subject.name}, tier {selection.tier}, {len(cases)} cases in one process: {took}"
    for case in selection.cases:
        if selection.device.type == "cuda":
            execute(steps.Trial(subject, case))
            forget()
        yield f"{subject.name}, {case.id}: {_steps(subject, [case])}"


def _steps(subject: Subject, cases: Sequence[Case]) -> str:
    """Seconds of all cases, and of each step with its share."""
    seconds: dict[str, float] = defaultdict(float)
    started = time.perf_counter()
    with _clocked(seconds, subject.device):
        for case in cases:
            execute(steps.Trial(subject, case))
    total = time.perf_counter() - started
    seconds["rest"] = total - sum(seconds.values())
    parts = (*_PARTS.values(), "rest")
    return f"{total:.2f} s: " + ", ".join(
        f"{part} {seconds[part]:.2f} s ({seconds[part] / total:.0%})" for part in parts
    )


@contextmanager
def _clocked(seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    """Add up what each step of a trial takes, the device's work included."""

    def clocked(part: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = step(*arguments, **options)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[part] += time.perf_counter() - started
            return result

        return run

    with ExitStack() as patches:
        for name, part in _PARTS.items():
            patches.enter_context(patch.object(steps, name, clocked(part, getattr(steps, name))))
        yield


def plugin_cost() -> Iterator[str]:
    """A line on a pytest run that has nothing to do with the suite."""
    bare, loaded = (_pytest_seconds(arguments) for arguments in (["-p", "no:mla_conformance"], []))
    yield f"an unrelated pytest run: {loaded - bare:+.3f} s with the plugin ({bare:.3f} s without)"


def _pytest_seconds(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_nothing.py")
        test.write_text("def test_nothing():\n    pass\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), *arguments]
        run = lambda: subprocess.run(command, capture_output=True, check=True, cwd=folder)  # noqa: E731
        return timed(run, torch.device("cpu")).median
