"""Where the time of a run of the suite goes, and what the plugin costs a run that does not use it."""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mla_conformance.bench.timing import timed
from mla_conformance.cases.case import Case
from mla_conformance.engine.request import Request
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject


def split(request: Request, device: torch.device) -> Iterator[str]:
    """Lines on how long cases take on a backend, in one process, and what of it each phase: a tier, or named cases.

    On a GPU a named case is judged before it is measured: what is compiled then is not counted.
    """
    (backend,) = request.backends
    subject = Subject(backend, device)
    if not request.cases:
        cases = [case for name in request.capabilities for case in request.cases_of(name)]
        took = _phases(subject, cases)
        yield f"{subject.name}, tier {request.tier}, {len(cases)} cases in one process: {took}"
    for case in request.cases:
        if device.type == "cuda":
            judge_one(subject, case, Context())
        yield f"{subject.name}, {case.id}: {_phases(subject, [case])}"


def _phases(subject: Subject, cases: Sequence[Case]) -> str:
    """Seconds of all cases, and of each phase with its share."""
    context, seconds, started = Context(), Counter[str](), time.perf_counter()
    for case in cases:
        seconds.update(judge_one(subject, case, context).phases)
    total = time.perf_counter() - started
    parts = {**seconds, "rest": total - sum(seconds.values())}
    shares = (f"{part} {spent:.2f} s ({spent / total:.0%})" for part, spent in parts.items())
    return f"{total:.2f} s: " + ", ".join(shares)


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
