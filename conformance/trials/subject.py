"""The backend under test: its class in each role, what it and its device support of a space, and what is told of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from mla_conformance.backends import declaration, foreign, graph_support, hub
from mla_conformance.backends.kernel import get_device_capability
from mla_conformance.backends.loading import resolve_backend, roles_of, unavailable_reasons
from mla_conformance.backends.references import BackendReference, BackendReferenceError, parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.cases import covering, fitting, work
from mla_conformance.cases.case import Case
from mla_conformance.cases.space import Space
from mla_conformance.driving.driver import IN_PROCESS, Executor, run_calls
from mla_conformance.driving.loaded import loaded_libraries
from mla_conformance.files.places import file_digest, place_of
from mla_conformance.judging import golden, record
from mla_conformance.problems.memory import whole_memory
from mla_conformance.problems.operands import TORCH_DTYPES
from mla_conformance.roles.definition import DEFINITIONS, build_problem
from mla_conformance.vocabulary.capabilities import CAPABILITIES, DUE_ON_GPU, find_capability, is_due_on_gpu, listed

_GIB = 2**30
_KERNELS_OF_LAYERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class Subject:
    backend: BackendReference  # names it
    device: torch.device  # where it is judged
    executor: Executor = IN_PROCESS  # carries out whatever imports it, asks it or calls it
    _classes: dict[Role, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _declared: dict[Role, declaration.Declaration] = field(default_factory=dict, init=False, repr=False, compare=False)
    _missing: dict[Role, list[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(reference: str, device: torch.device, executor: Executor = IN_PROCESS) -> "Subject":
        return Subject(parse_reference(reference), device, executor)

    def __reduce__(self) -> tuple[Any, ...]:
        """In the process that imports it, it is one object for all steps."""
        return _here, (self.backend.reference, self.device)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """What the backend computes; kernels for prefill and decode make a layer."""
        roles = roles_of(self.backend)
        composed = set(_KERNELS_OF_LAYERS) <= set(roles) and Role.LAYER not in roles
        return (*roles, Role.LAYER) if composed else roles

    def class_of(self, role: Role) -> Any:
        """The class that calls of a role go to on this device; of a layer the common one, unless one is named."""
        if role not in self._classes:  # what names it is looked up in files
            named = resolve_backend(self.backend, get_device_capability(self.device), role)
            if role is Role.LAYER and not named:
                from mla_conformance.backends.layer.mla_layer import mla_backend  # with all that only layers need

                named = mla_backend(*map(self.class_of, _KERNELS_OF_LAYERS))
            self._classes[role] = named
        return self._classes[role]

    def declared(self, role: Role) -> declaration.Declaration:
        if role not in self._declared:
            self._declared[role] = declaration.declaration_of(self.class_of(role))
        return self._declared[role]

    @property
    def declarations(self) -> dict[str, declaration.Declaration]:
        return {str(role): self.declared(role) for role in self.roles if not self.missing_role(role)}

    @cached_property
    def unavailable(self) -> list[str]:
        return unavailable_reasons(self.backend, get_device_capability(self.device))

    def missing_role(self, role: Role) -> list[str]:
        """Why no call of a role can be made: the backend has other roles only, or this one cannot run here."""
        if role not in self.roles:
            return [f"{' and '.join(self.roles)} only"]
        if role not in self._missing:  # what it needs is looked for in files
            named, capability = roles_of(self.backend), get_device_capability(self.device)
            needed = (role,) if role in named else named  # of a layer that the others make
            reasons = [reason for each in needed for reason in unavailable_reasons(self.backend, capability, each)]
            self._missing[role] = [f"{role} unavailable: {'; '.join(reasons)}"] if reasons else []
        return self._missing[role]

    def unsupported(self, case: Case) -> list[str]:
        if missing := self.missing_role(case.role):
            return missing
        dtype = TORCH_DTYPES[case.dtype]
        needs = find_capability(case.capability).needs
        if needs and not getattr(self.declared(case.role), needs):
            return [f"not declared {needs}"]
        kernel = self.class_of(case.role)
        reasons = DEFINITIONS[case.role].reasons(kernel, case, dtype, get_device_capability(self.device))
        return reasons or device_reasons(case, self.device, kernel)

    def create(self, case: Case) -> Any:
        dtype = TORCH_DTYPES[case.dtype] or torch.bfloat16
        return DEFINITIONS[case.role].kernel(self.class_of(case.role), case, dtype, self.device)


@cache
def _here(reference: str, device: torch.device) -> Subject:
    return Subject.of(reference, device)


def device_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    capability = find_capability(case.capability)
    if capability.needs_cuda and device.type != "cuda":
        return ["needs a CUDA device"]
    if device.type == "cpu" and is_due_on_gpu(case):
        most = work.LARGE_CPU_WORK if capability.large else work.CPU_WORK
        what = f"{work.work_of(case):.2g} operations, a CPU is asked for {most:.2g}"
        return [f"{DUE_ON_GPU}: {'so many rows are computed there' if case.far.startswith('rows') else what}"]
    if capability.captures:
        return _graph_reasons(case, device, backend_class)
    # What others hold of a device at the moment is no reason: a trial waits for it.
    if case.far == "none" or device.type != "cuda":
        return []
    needed, whole = golden.needed_bytes(case), whole_memory(device)
    lacking = f"needs a device with {needed / _GIB:.0f} GiB of memory, this one has {whole / _GIB:.0f} GiB"
    return [lacking] if needed > whole else []


def _graph_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    if getattr(case, "ranks", 1) > 1 or getattr(case, "tp", 1) > 1:
        return ["graphs are captured on one rank only"]
    if case.role in (Role.LAYER, Role.SPARSE_LAYER) and device.type != "cuda":
        return []  # replayed as a call over the same buffers
    needed = graph_support.AttentionCGSupport.UNIFORM_BATCH
    if case.role is Role.PREFILL:
        needed = graph_support.AttentionCGSupport.ALWAYS
    elif case.role is Role.LAYER or max(case.q) == 1:
        needed = graph_support.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declared = getattr(backend_class, "cudagraph_support", graph_support.AttentionCGSupport.NEVER)
    if case.role is Role.LAYER:
        declared = backend_class.get_builder_cls().get_cudagraph_support(None, None)
    if declared.value >= needed.value:
        return []
    return [f"CUDA graphs of such a batch not declared (cudagraph_support {declared.name}, needed {needed.name})"]


def region_of(subject: Subject, space: Space, triples: int = 0, salt: str = "") -> fitting.Region:
    """What a backend declares of a space, with cases fitted to it; nothing of a role that cannot run here."""
    cases, most = listed(space), work.CPU_WORK if subject.device.type == "cpu" else work.LARGE_CPU_WORK
    supported = list(compress(cases, _supported(subject, cases)))
    if not supported:
        return fitting.Region(space, [])
    sessions = [case for case in CAPABILITIES[fitting.SESSIONS].cases if case.role is space.role]
    supports, pairs = partial(_supported, subject), reachable(space, most)
    return fitting.fit(space, supported, supports, pairs, most, triples, salt, sessions)


def reachable(space: Space, most: float) -> covering.Pairs:
    """The pairs that listed cases of no more than so much work hold.

    On a GPU heavier ones take half of a run once they are fitted to a kernel, and finding them half a minute.
    """
    return covering.Pairs(space, space.rows(case for case in listed(space) if work.work_of(case) <= most))


def _supported(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    answered = subject.executor.query(partial(_asked, subject, tuple(cases)), list[bool])
    return [False] * len(cases) if answered.error else answered.value


def _asked(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    return [not subject.unsupported(case) for case in cases]


_LONGEST = 240  # characters of a kernel's name that are kept: templates of CUTLASS run to thousands
_CALLS_OF_THE_HOST = ("cuda", "cuLaunch", "Activity", "INVALID", "Lazy Function Loading")


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
        kernels = {role: each for role, each in declared.items() if role != Role.LAYER}
        rounding: dict[str, str] = {}  # classes by name; those of a role beside prefill say so
        for role, each in (kernels or declared).items():
            prefix = f"{role}: " if role != Role.PREFILL and len(kernels) > 1 else ""
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
