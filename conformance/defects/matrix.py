"""Every known defect and every honest kernel on every case: who is killed by what.

Cases are taken one by one and all kernels run on each, so that a golden result is computed once.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context

import torch

from mla_conformance.backends.references import BackendReference, known_backends
from mla_conformance.backends.roles import Role
from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.cases.case import Case
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import judged_roles, known_defects
from mla_conformance.driving.subject import Subject
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one


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
    """

    kernel: str
    capability: str
    case: str
    killed: bool
    message: str


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
    with ProcessPoolExecutor(count, get_context("spawn"), initializer=partial(torch.set_num_threads, 1)) as pool:
        return [outcome for outcomes in pool.map(run_case, cases) for outcome in outcomes]


def run_case(case: Case) -> list[Outcome]:
    """All kernels that the case is about."""
    context = Context()
    return [_outcome(case, kernel, context) for kernel in kernels() if kernel.serves(case)]


def _outcome(case: Case, kernel: Kernel, context: Context) -> Outcome:
    record = judge_one(kernel.subject(), case, context)
    return Outcome(kernel.name, case.capability, case.id, record.failed, record.message)
