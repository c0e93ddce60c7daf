"""What a backend's calls run: the kernels of one case of each capability, and the libraries that it loaded."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import run_calls
from mla_conformance.driving.trace import kernels_of, library_digests, loaded_libraries
from mla_conformance.judging.traced import NOTHING_TRACED, Traced
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.subject import Subject


def trace_all(subject: Subject, cases: Mapping[str, str]) -> Traced:
    """Import a backend and call it once more, on cases that it passed; one that raises costs its own kernels alone."""
    before, seen = loaded_libraries(), NOTHING_TRACED
    with contextlib.suppress(Exception):
        _ = subject.unavailable
    for asked in ({capability: case} for capability, case in cases.items()):
        with contextlib.suppress(Exception):
            seen = seen.joined(traced(subject, asked, loaded_libraries()))
    with contextlib.suppress(Exception):
        seen = seen.joined(traced(subject, {}, before))
    return seen


def traced(subject: Subject, cases: Mapping[str, str], before: set[str]) -> Traced:
    """Call a backend on a GPU once more, on cases that it passed.

    Args:
        subject: the backend on its device.
        cases: the id of a case for each capability.
        before: the libraries of the process before the backend was imported.
    """
    kernels = {capability: _kernels(subject, Case.parse(case)) for capability, case in cases.items()}
    return Traced(kernels, library_digests(loaded_libraries() - before, subject.backend.file))


def _kernels(subject: Subject, case: Case) -> tuple[str, ...]:
    """The kernels of a case's calls, after a first time that plans and compiles."""
    problem, backend = build_problem(case, subject.device), subject.create(case)
    run_calls(backend, problem)
    return kernels_of(partial(_call, backend, problem), subject.device)


def _call(backend: Any, problem: Problem) -> None:
    """The calls alone, without what the driver does around them."""
    for call in problem.calls:
        call.prepare(backend)
        call.invoke(backend, call.output_buffer())
