"""What is told of a backend: what it declares of a space, its facts, and what its calls run."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from mla_conformance.backends import foreign, hub, roles
from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.cases import covering, fitting, work
from mla_conformance.cases.case import SESSIONS, Case
from mla_conformance.cases.space import Space
from mla_conformance.driving.driver import run_calls
from mla_conformance.driving.loaded import loaded_libraries
from mla_conformance.files.places import file_digest, place_of
from mla_conformance.judging import record
from mla_conformance.roles.definition import build_problem
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES, listed

_LONGEST = 240  # characters of a kernel's name that are kept: templates of CUTLASS run to thousands
_CALLS_OF_THE_HOST = ("cuda", "cuLaunch", "Activity", "INVALID", "Lazy Function Loading")


def region_of(subject: Subject, space: Space, triples: int = 0, salt: str = "") -> fitting.Region:
    """What a backend declares of a space, with cases fitted to it; nothing of a role that cannot run here."""
    cases, most = listed(space), work.CPU_WORK if subject.device.type == "cpu" else work.LARGE_CPU_WORK
    supported = list(compress(cases, _supported(subject, cases)))
    if not supported:
        return fitting.Region(space, [])
    sessions = [case for case in CAPABILITIES[SESSIONS].cases if case.role is space.role]
    # On a GPU heavier ones take half of a run once they are fitted to a kernel, and finding them half a minute.
    pairs = covering.Pairs(space, space.rows(case for case in cases if work.work_of(case) <= most))
    return fitting.fit(space, supported, partial(_supported, subject), pairs, most, triples, salt, sessions)


def _supported(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    answered = subject.executor.query(partial(_asked, subject, tuple(cases)), list[bool])
    return [False] * len(cases) if answered.error else answered.value


def _asked(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    return [not subject.unsupported(case) for case in cases]


def describe(subject: Subject) -> record.BackendFacts:
    """The facts of a backend, for a parent that does not import it; one that raises when it is asked is unavailable."""
    try:
        reference, reasons = subject.backend.reference, tuple(subject.unavailable)
        declared, versions = {} if reasons else subject.declarations, dict[str, str]()
        for name in dict.fromkeys(chain.from_iterable(each.distributions for each in declared.values())):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "not installed as a distribution"
        # What tells that a backend is still the same: its file, or its distributions' versions.
        fingerprint = ", ".join(f"{name} {version}" for name, version in versions.items()) or "no distribution"
        if (location := reference.rpartition(":")[0]).endswith(".py"):
            fingerprint = "file " + hashlib.sha256(Path(location).read_bytes()).hexdigest()[:12]
        elif reference.startswith(hub.HUB):
            fingerprint = "hub " + hub.digest(reference)[:12]
        elif reasons:
            fingerprint = "unavailable"
        kernels = {role: each for role, each in declared.items() if role != roles.Role.LAYER}
        rounding: dict[str, str] = {}  # classes by name; those of a role beside prefill say so
        for role, each in (kernels or declared).items():
            prefix = f"{role}: " if role != roles.Role.PREFILL and len(kernels) > 1 else ""
            for operands, classes in (("", each.rounding), ("e4m3 operands: ", each.e4m3_rounding)):
                named = {} if classes is None else vars(classes)
                rounding |= {f"{prefix}{operands}{name}": value.value for name, value in named.items()}
        deviations = dict.fromkeys(chain.from_iterable(each.deviations for each in declared.values()))
        return record.BackendFacts(
            subject.backend.name,
            reference,
            reasons,
            versions=versions,
            emulated=any(each.emulated for each in declared.values()),
            deviations=tuple((each.library, each.adapter) for each in deviations),
            rounding=rounding,
            fingerprint=fingerprint,
        )
    except BackendReferenceError as error:
        return unavailable(subject, foreign.one_line(error).removeprefix(f"{BackendReferenceError.__name__}: "))
    except BaseException as error:
        return unavailable(subject, f"could not be described: {foreign.one_line(error)}")


def unavailable(subject: Subject, reason: str) -> record.BackendFacts:
    return record.BackendFacts(subject.backend.name, subject.backend.reference, (reason,), fingerprint="unavailable")


def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Names of the kernels that a GPU ran meanwhile, in alphabetical order."""
    # What stands before it in torch.profiler imports Torch's compiler, which takes five seconds.
    with profile(use_cpu=False, use_device="cuda", use_kineto=True, acc_events=True) as found:
        call()
        torch.cuda.synchronize(device)
    names = {event.key[:_LONGEST] for event in found.key_averages()}
    return tuple(sorted(name for name in names if not name.startswith(_CALLS_OF_THE_HOST)))


def trace_all(subject: Subject, cases: Mapping[str, str]) -> record.Traced:
    """What a backend's calls of cases that it passed run, by capability, and the libraries that it loaded."""
    before, kernels, libraries = loaded_libraries(), dict[str, tuple[str, ...]](), dict[str, str]()
    with suppress(Exception):
        _ = subject.unavailable
    for capability, text in cases.items():
        with suppress(Exception):
            case = Case.parse(text)
            problem, backend = build_problem(case, subject.device), subject.create(case)
            run_calls(backend, problem)  # which plans and compiles

            def calls(backend: Any = backend, problem: Any = problem) -> None:  # the driver does more around them
                for call in problem.calls:
                    call.prepare(backend)
                    call.invoke(backend, call.output_buffer())

            kernels = {capability: kernels_of(calls, subject.device), **kernels}
    with suppress(Exception):
        loaded = sorted(loaded_libraries() - before)
        libraries = {place_of(Path(path), subject.backend.file): file_digest(Path(path)) for path in loaded}
    return record.Traced(kernels, libraries)
