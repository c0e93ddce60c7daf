"""The kill matrix: every known defect and every honest kernel on the cases of a tier, as data, and as text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch

from mla_conformance.backends.references import BackendReference, known_backends
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import KnownDefect, judged_roles, known_defects, reported_bugs
from mla_conformance.driving.loaded import judging_sources
from mla_conformance.files.installed import meaning_digest, source_digests
from mla_conformance.files.whole import decode
from mla_conformance.judging.record import Record
from mla_conformance.trials import subject, trial
from mla_conformance.vocabulary.capabilities import CAPABILITIES, CONFORMS, SPACES, Tier

PROMISED = {Tier.SMOKE: 0.95, Tier.FULL: 1.0, Tier.NIGHTLY: 1.0}
"""Share of the known defects that a tier promises to kill: smoke by any capability, the others as expected."""
_DECIDE_NOTHING = ("__init__", "known", "report")  # the modules of this room that hold no kernel
_GOLDEN = ("error_budget", "indexer")
"""Of the reference, which has a digest of its own, what depends on the defects' numbers."""
_MOST_WORKERS = 16  # each takes some hundred megabytes, and a core


@dataclass(frozen=True)
class MatrixKernel:
    name: str  # an id or a class name
    reference: str  # what loads its class
    killed_by: str = ""  # the capability that is expected to kill it; empty of an honest kernel
    roles: tuple[Role, ...] = tuple(ROLES.values())  # whose cases it is judged on


# Cases of one capability in their order, and the kernels that run on them; a kill ends a defect's part in it.
MatrixTask = tuple[Sequence[Case], Sequence[MatrixKernel]]


@cache
def kernels() -> Sequence[MatrixKernel]:
    """Every kernel of the run: real ones that run on a CPU, taken for honest, and all that are emulated."""
    subjects = [subject.Subject(backend, torch.device("cpu")) for backend in known_backends()]
    real = (x for x in subjects if not x.unavailable and not any(each.emulated for each in x.declarations.values()))
    return [*(MatrixKernel(x.backend.name, x.backend.reference) for x in real), *emulated()]


def emulated() -> list[MatrixKernel]:
    honest = [MatrixKernel(cls.__name__, f"{cls.__module__}:{cls.__name__}", roles=judged_roles(cls)) for cls in HONEST]
    known = known_defects().values()
    return honest + [MatrixKernel(x.id, x.reference, x.killed_by, judged_roles(x.kernel)) for x in known]


def run_matrix(tier: Tier, cores: int) -> list[Record]:
    """All kernels on what a tier asks of them, in processes of their own, one a core.

    First come honest kernels on each case, and each capability for the defects that it is expected to kill. Of these,
    those that were killed run on what stands before their capability, which must not kill them, unless that is one of
    combinations or the tier asks only who dies; the others on everything.
    """
    workers, one_core, order = min(_MOST_WORKERS, cores), partial(torch.set_num_threads, 1), list(CAPABILITIES)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=one_core) as pool:

        def run(tasks: Iterable[MatrixTask]) -> list[Record]:
            return [record for records in pool.map(run_task, tasks) for record in records]

        expected = (
            (capability.select(tier), [kernel for kernel in kernels() if kernel.killed_by == capability.name])
            for capability in CAPABILITIES.values()
        )
        first = run(chain(_on_each_case(tier, lambda kernel, capability: not kernel.killed_by), expected))
        killed = {record.backend for record in first if record.failed}

        def is_left(kernel: MatrixKernel, capability: str) -> bool:
            if kernel.killed_by in ("", capability):
                return False
            before = kernel.killed_by not in SPACES and order.index(capability) < order.index(kernel.killed_by)
            return kernel.name not in killed or (before and tier is not Tier.SMOKE)

        return first + run(_on_each_case(tier, is_left))


def _on_each_case(tier: Tier, asked: Callable[[MatrixKernel, str], bool]) -> Iterator[MatrixTask]:
    for capability in CAPABILITIES.values():
        chosen = [kernel for kernel in kernels() if asked(kernel, capability.name)]
        # Kernels of one task share a golden result; of a procedure of many calls each takes seconds of its own.
        together = [chosen] if capability.procedure == CONFORMS else [[kernel] for kernel in chosen]
        yield from (((case,), some) for case in capability.select(tier) for some in together if some)


def run_task(task: MatrixTask) -> list[Record]:
    """Its kernels on those of its cases that are about them."""
    (cases, asked), context, records = task, trial.Context(), []
    for case in cases:
        found = [trial.judge_one(_subject(kernel), case, context) for kernel in asked if case.role in kernel.roles]
        dead = {record.backend for record in found if record.failed}
        asked = [kernel for kernel in asked if not kernel.killed_by or kernel.name not in dead]
        records += found
    return records


@cache
def _subject(kernel: MatrixKernel) -> subject.Subject:
    return subject.Subject(BackendReference(kernel.name, kernel.reference), torch.device("cpu"))


class DefectReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # of everything that decides a verdict: when it was run, and what a lock showed to judge alike since
    digests: list[str]
    tier: str  # cases that were run
    # for each defect the capabilities that kill it, in the order of the vocabulary, of those that it was run on; behind
    # the expected one it was not
    kills: dict[str, list[str]]
    killing_cases: dict[str, str]  # for each defect the first case that kills it, of the capability that is expected to
    false_alarms: list[str]  # honest (kernel, case) pairs that the suite fails
    honest_pairs: int  # honest pairs in the run

    @property
    def survivors(self) -> list[str]:
        """Defects that the tier leaves alive, or that something unrelated kills first."""
        return [entry.id for entry in known_defects().values() if not self.dies(entry)]

    def dies(self, entry: KnownDefect) -> bool:
        """Whether a defect is killed in the way that the tier promises."""
        killers = self.kills[entry.id]
        return bool(killers) if self.tier == Tier.SMOKE else as_expected(entry, killers)

    @property
    def holds(self) -> bool:
        """Whether the tier keeps its promise, and no honest kernel fails."""
        dead = len(self.kills) - len(self.survivors)
        return not self.false_alarms and dead >= PROMISED[Tier(self.tier)] * len(self.kills)


def as_expected(entry: KnownDefect, killers: Sequence[str]) -> bool:
    """Killed by the expected capability, and before it by related ones at most; by any before one of combinations."""
    if entry.killed_by not in killers:
        return False
    # What needs two facts together may meet them anywhere.
    return entry.killed_by in SPACES or set(killers[: list(killers).index(entry.killed_by)]) <= set(entry.related)


def summarise(records: Iterable[Record], tier: str, digest: str) -> DefectReport:
    """Count what a run over all kernels showed; ``digest`` is of when it began."""
    rows, known = list(records), known_defects()
    honest = {kernel.name for kernel in kernels() if not kernel.killed_by}
    failed = [row for row in rows if row.failed]
    killed = {(row.backend, row.capability) for row in failed}
    kills = {id: [name for name in CAPABILITIES if (id, name) in killed] for id in known}
    killing_cases: dict[str, str] = {}
    for row in failed:
        if row.backend in known and known[row.backend].killed_by == row.capability:
            killing_cases.setdefault(row.backend, row.case)
    alarms = [f"{row.backend} on {row.case}: {row.message}" for row in failed if row.backend in honest]
    return DefectReport([digest], tier, kills, killing_cases, alarms, sum(row.backend in honest for row in rows))


def terminal_lines(report: DefectReport) -> Iterator[str]:
    """The matrix, a defect a line."""
    for entry in known_defects().values():
        killers = report.kills[entry.id]
        sign = "✔" if report.dies(entry) else "✘"
        others = [name for name in killers if name != entry.killed_by]
        yield f"{sign} {entry.family:<14} {entry.id:<52} {entry.killed_by:<18} also: {', '.join(others) or '–'}"
    yield from (f"ALIVE {id}" for id in report.survivors)
    yield from (f"FALSE ALARM {alarm}" for alarm in report.false_alarms)
    yield f"{len(reported_bugs().not_emulated)} reported bugs of these layers are not emulated:"
    yield from (f"  {id}: {reason}" for id, reason in reported_bugs().not_emulated.items())
    yield closing_line(report)


def closing_line(report: DefectReport) -> str:
    alive, total, tier = len(report.survivors), len(report.kills), Tier(report.tier)
    killed = "killed" if tier is Tier.SMOKE else "killed as expected"
    promise = f", which promises {PROMISED[tier]:.0%}" if PROMISED[tier] < 1 else ""
    return (
        f"{total - alive} of {total} known defects {killed} · {len(report.false_alarms)} false alarms of "
        f"{report.honest_pairs} honest (kernel, case) pairs · tier {tier}{promise}"
    )


def markdown(report: DefectReport) -> str:
    """The section of docs/known-defects.md."""
    rest = f"{len(reported_bugs().not_emulated)} further reports are not emulated; `mla-conformance defects` says why."
    lacking = (f"- {thread}: {reason}" for thread, reason in reported_bugs().pipeline.items() if reason)
    return "\n".join([f"{closing_line(report)}. {rest}", "", "Of layers with selected keys:", "", *lacking])


def stored() -> DefectReport:
    """The report of the last full run that was committed."""
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    return decode(text, DefectReport, "defects.json")


def deciding_digest() -> str:
    """Digest of the judge, the suite's procedures, the data, and the kernels with the steps they consist of.

    It is of the cases, too, with which the suite's version began. Comments, descriptions and layout do not count, nor
    does the version of Python that reads the code.
    """
    reference, room = (Path(str(files(f"mla_conformance.{name}"))) for name in ("reference", "defects"))
    names = [path.stem for path in room.glob("*.py") if path.stem not in _DECIDE_NOTHING]
    kernels = source_digests(f"{__package__}.{name}" for name in names)
    lists = ("\n".join(case.id for case in capability.first_cases) for capability in CAPABILITIES.values())
    sources = [*judging_sources(), *(reference / f"{name}.py" for name in _GOLDEN)]
    expected = (f"{x.id} {x.killed_by} {' '.join(x.related)}" for x in known_defects().values())
    return meaning_digest(sources, *lists, *(f"{name} {digest}" for name, digest in kernels.items()), *expected)[:16]
