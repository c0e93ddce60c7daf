"""Where the time of a run of the suite goes, what the plugin costs any other, and how fast the judged kernels are.

The throughput of kernels is information, never part of a verdict.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.backends.references import known_backends, known_variants
from mla_conformance.bench.timing import Timing, timed
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import operations_of
from mla_conformance.engine.request import RunRequest
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

_CASES = {
    "cpu": Case.of(capability="new_tokens", heads=4, q=(512,), layout="packed"),
    "cuda": Case.of(capability="new_tokens", heads=16, q=(16384,), layout="packed"),
}
_CEILING_SIZE = {"cpu": 1024, "cuda": 8192}


def split(request: RunRequest, device: torch.device) -> Iterator[str]:
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
        test.write_text("def test_nothing():\n    pass\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), *arguments]
        run = lambda: subprocess.run(command, capture_output=True, check=True, cwd=folder)  # noqa: E731
        return timed(run, torch.device("cpu")).median


def throughput(device: torch.device) -> Iterator[str]:
    """A line for each backend that can run here: useful TFLOP/s and its share of what a matrix product reaches."""
    ceiling = _matrix_product(device)
    yield f"bf16 matrix product of {_CEILING_SIZE[device.type]}³ on this device: {ceiling / 1e12:.3g} TFLOP/s"
    case = _CASES[device.type]
    for backend in (*known_backends(), *known_variants()):
        subject = Subject(backend, device)
        if subject.unavailable:
            continue
        try:
            timing = _seconds(subject, case)
        except Exception as error:  # a kernel that fails here is judged elsewhere
            yield f"{subject.name:<20} {one_line(error)[:90]}"
            continue
        rate = operations_of(case) / timing.median
        yield f"{subject.name:<20} {timing}, {rate / 1e12:.3g} TFLOP/s, {rate / ceiling:.1%} of it, on {case.id}"


def _seconds(subject: Subject, case: Case) -> Timing:
    problem = build_problem(case, subject.device)
    backend, call = subject.create(case), problem.attention[0]
    call.prepare(backend)
    return timed(
        lambda: backend.run_prefill_new_tokens(call.q, call.k, call.v, return_softmax_lse=True), subject.device
    )


def _matrix_product(device: torch.device) -> float:
    """Operations per second of a large bf16 matrix product."""
    size = _CEILING_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2.0 * size**3 / timed(lambda: a @ b, device).median
