"""Every known defect and every honest kernel on the cases of a tier: who is killed by what."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context

import torch

from mla_conformance.backends.references import BackendReference, known_backends
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import judged_roles, known_defects
from mla_conformance.judging.record import Record
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import CAPABILITIES, CONFORMS, SPACES, Tier

_MOST_WORKERS = 16  # each takes some hundred megabytes, and a core


@dataclass(frozen=True)
class MatrixKernel:
    name: str  # an id or a class name
    reference: str  # what loads its class
    killed_by: str = ""  # the capability that is expected to kill it; empty of an honest kernel
    roles: tuple[Role, ...] = tuple(ROLES.values())  # whose cases it is judged on

    @property
    def honest(self) -> bool:
        return not self.killed_by

    def serves(self, case: Case) -> bool:
        return case.role in self.roles


# Cases of one capability in their order, and the kernels that run on them; a kill ends a defect's part in it.
MatrixTask = tuple[Sequence[Case], Sequence[MatrixKernel]]


@cache
def kernels() -> Sequence[MatrixKernel]:
    """Every kernel of the run: real ones that run on a CPU, taken for honest, and all that are emulated."""
    subjects = [Subject(backend, torch.device("cpu")) for backend in known_backends()]
    real = (x for x in subjects if not x.unavailable and not any(each.emulated for each in x.declarations.values()))
    return [*(MatrixKernel(x.backend.name, x.backend.reference) for x in real), *emulated()]


def emulated() -> list[MatrixKernel]:
    honest = [MatrixKernel(cls.__name__, f"{cls.__module__}:{cls.__name__}", roles=judged_roles(cls)) for cls in HONEST]
    known = known_defects().values()
    return honest + [MatrixKernel(x.id, x.reference, x.killed_by, judged_roles(x.kernel)) for x in known]


def run_matrix(tier: Tier, cores: int) -> list[Record]:
    """All kernels on what a tier asks of them, in processes of their own, one a core."""
    workers, one_core = min(_MOST_WORKERS, cores), partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=one_core) as pool:

        def run(tasks: Iterator[MatrixTask]) -> list[Record]:
            return [record for records in pool.map(run_task, tasks) for record in records]

        first = run(first_tasks(tier))
        return first + run(further_tasks(tier, {record.backend for record in first if record.failed}))


def first_tasks(tier: Tier) -> Iterator[MatrixTask]:
    """Honest kernels on each case, and each capability for the defects that it is expected to kill."""
    yield from _on_each_case(tier, lambda kernel, capability: kernel.honest)
    for capability in CAPABILITIES.values():
        expected = [kernel for kernel in kernels() if kernel.killed_by == capability.name]
        yield capability.select(tier), expected


def further_tasks(tier: Tier, killed: Collection[str]) -> Iterator[MatrixTask]:
    """What is left to ask of the defects, of which these were ``killed`` as expected.

    Those run on what stands before their capability, which must not kill them, unless that is one of combinations or
    the tier asks only who dies; the others on everything.
    """
    order = list(CAPABILITIES)

    def asked(kernel: MatrixKernel, capability: str) -> bool:
        if kernel.honest or kernel.killed_by == capability:
            return False
        before = kernel.killed_by not in SPACES and order.index(capability) < order.index(kernel.killed_by)
        return kernel.name not in killed or (before and tier is not Tier.SMOKE)

    return _on_each_case(tier, asked)


def _on_each_case(tier: Tier, asked: Callable[[MatrixKernel, str], bool]) -> Iterator[MatrixTask]:
    for capability in CAPABILITIES.values():
        chosen = [kernel for kernel in kernels() if asked(kernel, capability.name)]
        # Kernels of one task share a golden result; of a procedure of many calls each takes seconds of its own.
        together = [chosen] if capability.procedure == CONFORMS else [[kernel] for kernel in chosen]
        yield from (((case,), some) for case in capability.select(tier) for some in together if some)


def run_task(task: MatrixTask) -> list[Record]:
    """Its kernels on those of its cases that are about them."""
    (cases, asked), context, records = task, Context(), []
    for case in cases:
        found = [judge_one(_subject(kernel), case, context) for kernel in asked if kernel.serves(case)]
        dead = {record.backend for record in found if record.failed}
        asked = [kernel for kernel in asked if kernel.honest or kernel.name not in dead]
        records += found
    return records


@cache
def _subject(kernel: MatrixKernel) -> Subject:
    return Subject(BackendReference(kernel.name, kernel.reference), torch.device("cpu"))
