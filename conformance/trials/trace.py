"""What a backend's calls run: the kernels of one case of each capability, and the libraries that it loaded."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import run_calls
from mla_conformance.driving.loaded import loaded_libraries
from mla_conformance.files.places import file_digest, place_of
from mla_conformance.judging.record import NOTHING_TRACED, Traced
from mla_conformance.problems.calls import Problem
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.subject import Subject

_LONGEST = 240  # characters of a kernel's name that are kept: templates of CUTLASS run to thousands
_CALLS_OF_THE_HOST = ("cuda", "cuLaunch", "Activity", "INVALID", "Lazy Function Loading")


def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Names of the kernels that a GPU ran meanwhile, in alphabetical order."""
    # What stands before it in torch.profiler imports Torch's compiler, which takes five seconds.
    with profile(use_cpu=False, use_device="cuda", use_kineto=True, acc_events=True) as found:
        call()
        torch.cuda.synchronize(device)
    names = {event.key[:_LONGEST] for event in found.key_averages()}
    return tuple(sorted(name for name in names if not name.startswith(_CALLS_OF_THE_HOST)))


def library_digests(paths: set[str], beside: Path | None = None) -> dict[str, str]:
    """SHA-256 of each file by the name that it has on every machine; ``beside`` is the file of a backend."""
    return {place_of(Path(path), beside): file_digest(Path(path)) for path in sorted(paths)}


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
    """Call a backend on a GPU once more, on a case by capability that it passed.

    ``before`` are the libraries of the process before the backend was imported.
    """
    kernels = {}
    for capability, case in ((capability, Case.parse(text)) for capability, text in cases.items()):
        problem, backend = build_problem(case, subject.device), subject.create(case)
        run_calls(backend, problem)  # which plans and compiles

        def calls(backend: Any = backend, problem: Problem = problem) -> None:  # the driver does more around them
            for call in problem.calls:
                call.prepare(backend)
                call.invoke(backend, call.output_buffer())

        kernels[capability] = kernels_of(calls, subject.device)
    return Traced(kernels, library_digests(loaded_libraries() - before, subject.backend.file))
