"""Every known defect and every honest kernel on every case: who is killed by what, and what other rules would say.

Cases are taken one by one and all kernels run on each, so that a golden result is computed once.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context

import torch

from mla_conformance.backends.declaration import Precision
from mla_conformance.backends.references import BackendReference, known_backends
from mla_conformance.backends.roles import Role
from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import judged_roles, known_defects
from mla_conformance.driving.driver import run_calls
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.golden import expect
from mla_conformance.judging.judge import judge
from mla_conformance.judging.policies import POLICIES, Golden, twice_low_precision
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.build import build_problem
from mla_conformance.trials.execute import execute, failing
from mla_conformance.trials.trial import Trial

OURS = "this suite's rules"
NORMAL, CHOSEN = "N(0,1)", "this suite's data"
_COMPARED = ("new_tokens", "lse", "empty_rows", "context_chunk", "weights", "logit_range", "softmax_scale")
"""Capabilities whose cases every project's rule can be asked about: one call, bf16, nothing but values."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of the run.

    Attributes:
        name: an id or a class name.
        reference: what loads its class.
        honest: whether it is right.
        roles: whose cases it is judged on.
    """

    name: str
    reference: str
    honest: bool
    roles: tuple[Role, ...] = tuple(Role)

    def serves(self, case: Case) -> bool:
        """Whether the case is about this kernel."""
        return case.role in self.roles

    def subject(self) -> Subject:
        """The kernel as the suite sees it, on the CPU."""
        return Subject(BackendReference(self.name, self.reference), torch.device("cpu"))


@dataclass(frozen=True)
class Outcome:
    """One kernel on one case.

    Attributes:
        kernel: name of the kernel.
        capability: capability of the case.
        case: id of the case.
        killed: whether the verdict counts against the kernel.
        message: the verdict's sentence.
        rejected: (rule, data) pairs that reject the kernel's plain result.
        asked: (rule, data) pairs that were asked.
    """

    kernel: str
    capability: str
    case: str
    killed: bool
    message: str
    rejected: frozenset[tuple[str, str]]
    asked: frozenset[tuple[str, str]]


def kernels() -> list[Kernel]:
    """Honest kernels, the real ones among them, then the known defects."""
    honest = [Kernel(cls.__name__, f"{cls.__module__}:{cls.__name__}", True, judged_roles(cls)) for cls in HONEST]
    wrong = [Kernel(entry.id, entry.reference, False, entry.roles) for entry in known_defects().values()]
    return [*honest, *_real(), *wrong]


@cache
def _real() -> list[Kernel]:
    """Every real kernel that runs on a CPU; each is taken for honest, or it would not be among the suite's own."""
    subjects = [Subject(backend, torch.device("cpu")) for backend in known_backends()]
    return [
        Kernel(subject.name, subject.backend.reference, True)
        for subject in subjects
        if not subject.unavailable and not subject.declaration.emulated
    ]


def run_matrix(tier: Tier, workers: int | None = None) -> list[Outcome]:
    """All kernels on all cases of a tier, in processes of their own."""
    cases = [case for capability in CAPABILITIES.values() for case in capability.select(tier)]
    count = workers or max(1, min(4, os.cpu_count() or 1))
    run = partial(run_case, compare=tier is Tier.FULL)
    with ProcessPoolExecutor(count, get_context("spawn"), initializer=partial(torch.set_num_threads, 1)) as pool:
        return [outcome for outcomes in pool.map(run, cases) for outcome in outcomes]


def run_case(case: Case, compare: bool) -> list[Outcome]:
    """All kernels that the case is about; ``compare`` asks other projects' rules as well."""
    data = _compared(case) if compare else ()
    return [_outcome(case, kernel, data) for kernel in kernels() if kernel.serves(case)]


def _outcome(case: Case, kernel: Kernel, twins: Sequence[tuple[str, Case]]) -> Outcome:
    subject = kernel.subject()
    verdict = execute(Trial(subject, case))
    asked, rejected = set(), set()
    # The rules were written for 16-bit P; a kernel with an e4m3 P is outside of all of them.
    for data, compared in twins if subject.declaration.rounding.p is Precision.MODEL else ():
        for rule, accepted in _opinions(subject, compared):
            asked.add((rule, data))
            if not accepted:
                rejected.add((rule, data))
    return Outcome(
        kernel.name, case.capability, case.id, failing(verdict), verdict.message, frozenset(rejected), frozenset(asked)
    )


def _compared(case: Case) -> tuple[tuple[str, Case], ...]:
    """The case and its N(0,1) twin, if other projects' rules apply to it."""
    if case.capability not in _COMPARED or case.call == Call.CHUNKED_CONTEXT or case.dtype != "bf16":
        return ()
    return (CHOSEN, case), (NORMAL, replace(case, data="normal"))


def _opinions(subject: Subject, case: Case) -> Iterable[tuple[str, bool]]:
    """What every rule says of the plain result; a call that raises or returns another form is rejected by all."""
    problem = build_problem(case, subject.device)
    expectation = expect(problem)
    observation = run_calls(subject.create(case), problem)
    yield OURS, judge(problem, expectation, observation, subject.declaration).status is Status.PASS
    policies = (*POLICIES, twice_low_precision(problem))
    output, lse = _plain(observation.returned[0].value)
    golden = expectation.calls[0]
    if output is None or output.shape != golden.output.shape or (lse is not None and lse.shape != golden.lse.shape):
        yield from ((policy.name, False) for policy in policies)
        return
    yield from ((policy.name, policy.accepts(output, lse, Golden(golden.output, golden.lse))) for policy in policies)


def _plain(value: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    values: Sequence[object] = value if isinstance(value, tuple | list) else (value,)
    tensors = [entry if isinstance(entry, torch.Tensor) else None for entry in values]
    return tensors[0], tensors[1] if len(tensors) > 1 else None
