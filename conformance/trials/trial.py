"""A trial: one subject on one case, as the procedures see it; judging it is one function with one result, the record.

Inputs and golden results are made once for all backends of a case; each trial gets a copy of the inputs, so that
nothing that is kept is handed to a backend.
"""

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from math import inf
from typing import Any, NoReturn

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.foreign import AnswerError, cut, one_line
from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.driving.driver import Observation, Perform, Step, parts_of, run_calls, why_not_plain
from mla_conformance.judging.golden import MOST_OPERATIONS, Golden, memory_need
from mla_conformance.judging.record import BudgetUse, Check, Nonconformance, Record, Status, Verdict, failed
from mla_conformance.problems import memory
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.operands import ProblemError
from mla_conformance.roles.definition import DEFINITIONS, build_problem, golden_of, judge
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import find_capability

# Memory that inputs and golden results may keep, by type of device; larger inputs are built each time, while the last
# golden result is kept in any case.
PROBLEM_BYTES, GOLDEN_BYTES = {"cpu": 2**26, "cuda": 2**30}, {"cpu": 2**28, "cuda": 2**30}


@dataclass(eq=False)
class BoundedCache:
    """Values by key and device, within so many bytes; the one that was used longest ago goes first."""

    limits: Mapping[str, int]  # by type of device
    keeps_large: bool  # whether the last one is kept whatever its size
    entries: OrderedDict[tuple[str, str], tuple[Any, int]] = field(default_factory=OrderedDict)  # and bytes

    def get(self, key: str, device: torch.device, make: Callable[[], Any]) -> Any:
        place = (key, str(device))
        if place not in self.entries:
            value, limit = make(), self.limits[device.type]
            packed = value if isinstance(value, memory.Original) else memory.Original(value)
            storages = map(torch.Tensor.untyped_storage, packed.tensors)
            size = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
            if size > limit and not self.keeps_large:
                return value
            self.entries[place] = (value, size)
            while len(self.entries) > 1 and sum(size for _, size in self.entries.values()) > limit:
                self.entries.popitem(last=False)
        self.entries.move_to_end(place)
        return self.entries[place][0]


@dataclass(eq=False)
class Context:
    salt: str = ""  # what inputs are drawn with beside their case; empty for none
    _problems: BoundedCache = field(default_factory=partial(BoundedCache, PROBLEM_BYTES, False))
    _golden: BoundedCache = field(default_factory=partial(BoundedCache, GOLDEN_BYTES, True))

    def problem(self, case: Case, device: torch.device) -> Problem:
        """The inputs that a case stands for, in tensors that nothing else refers to: no backend gets what is kept."""

        def make() -> memory.Original[Problem]:
            built = build_problem(case, device, self.salt)
            return memory.Original(built, [built.case])

        made: memory.Original[Problem] = self._problems.get(case.id, device, make)
        return made.copy() if (case.id, str(device)) in self._problems.entries else made.value

    def expect(self, problem: Problem) -> Golden:
        """The golden result of a problem; asked for before a call, which may change its inputs."""
        return self._golden.get(problem.key, problem.device, partial(golden_of, problem))

    def forget(self) -> None:
        for kept in (self._problems, self._golden):
            kept.entries.clear()


@dataclass(frozen=True)
class Observed:
    problem: Problem
    expectation: Golden
    observation: Observation


@dataclass
class Trial:
    """Runs a subject and collects the verdict of everything that is judged on the way."""

    subject: Subject
    case: Case
    context: Context  # what the process has made before
    # the verdict so far; a pass carries the budget used by all judged steps
    verdict: Verdict = field(default_factory=lambda: Verdict(Status.HARNESS_ERROR, "nothing was judged"))
    last: Observed | None = None  # what was judged last
    disturbed: bool = False  # whether the backend left the process other than it found it

    @cached_property
    def problem(self) -> Problem:
        return self.build()

    def build(self, case: Case | None = None) -> Problem:
        return self.context.problem(case or self.case, self.subject.device)

    @cached_property
    def declaration(self) -> Declaration:
        return self.query("asked what it declares, it", partial(self.subject.declared, self.case.role), Declaration)

    @cached_property
    def backend(self) -> Any:
        return self.create()

    def create(self, case: Case | None = None) -> Any:
        return self.query("the constructor", partial(self.subject.create, case or self.case))

    def call(self, what: str, call: Step, reached: Iterable[torch.Tensor] = ()) -> Any:
        return self.query(what, call, reached=reached)

    def query(self, what: str, step: Step, kind: Any = None, reached: Iterable[torch.Tensor] | None = None) -> Any:
        """Plain data of this type, or what is for later steps; what it raises, or leaves changed, is a failure."""
        executor = self.subject.executor
        done = executor.query(step, kind) if reached is None else executor.call(step, reached)
        self.disturbed = self.disturbed or bool(done.disturbed)
        if done.out_of_memory:
            self.settle(Verdict(Status.UNAVAILABLE, f"out of memory: {done.error}"))
        if done.error:
            self.fail(Check.CALL, f"{what} raised {done.error}")
        if done.disturbed:
            self.fail(Check.PROCESS_STATE, f"{what} changed the process: {'; '.join(done.disturbed)}")
        return done.value

    def require_support(self) -> None:
        if find_capability(self.case.capability).probes_refusals:  # whose procedure asks what it declares
            reasons = self.query("asked what it is, it", partial(self.subject.missing_role, self.case.role), list[str])
        else:
            reasons = self.unsupported()
        if reasons:
            self.settle(Verdict(Status.UNSUPPORTED, "; ".join(reasons)))

    def unsupported(self, case: Case | None = None) -> list[str]:
        """What of a case, by default the trial's own, the backend declares unsupported; that it raises is a failure."""
        question = partial(_unsupported, self.subject, case or self.case)
        answer: list[str] | str = self.query("asked what it supports, it", question, list[str] | str)
        if isinstance(answer, str):
            self.fail(Check.CALL, f"asked what it supports, {answer}")
        return answer

    def conforms(self, problem: Problem | None = None, step: str = "") -> Observation:
        """Run a problem, by default the case's own, and judge everything; ``step`` says where this is in messages."""
        problem = problem or self.problem
        return self.judged(problem, self.context.expect(problem), self.run(self.backend, problem), step)

    def run(self, instance: Any, problem: Problem, prepare: bool = True, perform: Perform | None = None) -> Observation:
        # The metadata of ranks are handed over before each call in any case, since the ranks share the instance.
        ranks = isinstance(problem.case, CachedCase) and len(problem.calls) > 1
        observation = run_calls(instance, problem, prepare or ranks, self.subject.executor, perform)
        self.disturbed = self.disturbed or bool(observation.disturbed)
        return observation

    def judged(self, problem: Problem, expectation: Golden, observation: Observation, step: str = "") -> Observation:
        self.last = Observed(problem, expectation, observation)
        verdict = judge(problem, expectation, observation, self.declaration)
        if step and verdict.status is not Status.PASS:
            verdict = replace(verdict, message=f"{step}: {verdict.message}")
        self.settle(verdict)
        return observation

    def require(self, holds: bool, check: Check, message: str) -> None:
        if not holds:
            self.fail(check, message)

    def fail(self, check: Check, message: str) -> NoReturn:
        self.settle(failed(check, message))
        raise AssertionError("a failure settles a trial")

    def settle(self, verdict: Verdict) -> None:
        """Keep a pass together with what earlier steps used and left undecided; raise anything else."""
        before = self.verdict if self.verdict.status is Status.PASS else Verdict(Status.PASS)
        worst = {rule: max(share, getattr(before.used, rule)) for rule, share in vars(verdict.used).items()}
        # The most of one step, since steps repeat rows; a failure has none.
        undecided = max(before.inconclusive, verdict.inconclusive) if verdict.status is Status.PASS else 0
        self.verdict = replace(verdict, used=BudgetUse(**worst), inconclusive=undecided)
        if verdict.status is not Status.PASS:
            raise Nonconformance(self.verdict)


def _unsupported(subject: Subject, case: Case) -> list[str] | str:
    try:
        return subject.unsupported(case)
    except AnswerError as error:
        return str(error)


def returned_bytes(observation: Observation) -> list[bytes]:
    """The bytes of everything returned, as a value that later calls cannot change; of no tensor, what it is instead."""
    found = []
    for part in (part for returned in observation.returned for part in parts_of(returned.value)):
        if instead := why_not_plain(part):
            found.append(instead.encode())
        else:
            own = part.clone(memory_format=torch.contiguous_format)
            found.append(bytes(memory.storage_bytes(own).cpu().numpy().tobytes()))
    return found


def results(observation: Observation) -> list[torch.Tensor]:
    return list(parts_of(observation.returned[0].value))


MEMORY_PATIENCE = 120.0  # seconds for which a trial waits for a GPU's memory that others hold
OnStarted = Callable[[Case], None]  # told of a case when its backend's time begins
PROCEDURES = {  # by the names that entries of the vocabulary give procedures, the modules of this room that hold them
    procedure: module
    for module, procedures in {
        "procedures": "conforms determinism batch_invariance request_order causal_prefix split_invariance merge_states "
        "v_linearity no_side_effects selection_order selection_padding selection_rows refuses_or_conforms "
        "neighbours neighbour_keys",
        "session": "session many_batches layers_of_a_step",
        "layers": "cache_write weight_absorption prefill_decode_agreement layer_graph",
        "graph": "graph sparse_layer_graph streams",
        "bounds": "memory_bounds far",
    }.items()
    for procedure in procedures.split()
}


def load_procedures() -> None:
    """Have every role and procedure in memory, which are otherwise imported when a case first needs them."""
    for role in ROLES:
        _ = DEFINITIONS[role]
    for module in PROCEDURES.values():
        import_module(f"{__package__}.{module}")


def judge_one(subject: Subject, case: Case, context: Context, started: OnStarted = lambda case: None) -> Record:
    return judged_trial(subject, case, context, started)[1]


def judged_trial(
    subject: Subject, case: Case, context: Context, started: OnStarted = lambda case: None
) -> tuple[Trial, Record]:
    """The trial of a case, whose last observation can be explained, and its record.

    ``started`` is told of the case before anything of the backend is asked, and again after waiting for memory.
    """
    subject.executor.begin()
    trial, began, kind = Trial(subject, case, context), time.perf_counter(), subject.device.type
    try:
        started(case)
        trial.require_support()
        work, most = case.operations(), MOST_OPERATIONS.get(kind, inf)
        if work > most:
            what = f"too large for a {kind.upper()}: {work:.1e} useful operations, at most {most:.0e} are judged there"
            trial.settle(Verdict(Status.UNAVAILABLE, what))
        if kind == "cuda":
            _require_memory(trial)
            started(case)
        procedure = find_capability(case.capability).procedure
        getattr(import_module(f"{__package__}.{PROCEDURES[procedure]}"), procedure)(trial)
        verdict = trial.verdict
    except Nonconformance as outcome:
        verdict = outcome.verdict
    except (ProblemError, CaseError) as error:  # of inputs that the model's dtype cannot hold, or of a derived batch
        verdict = Verdict(Status.UNAVAILABLE, one_line(error))
    except Exception as error:
        if memory.out_of_memory(error):
            verdict = Verdict(Status.UNAVAILABLE, f"out of memory: {one_line(error)}")
        else:
            ours, theirs = "the suite itself failed (please report it)", "the role's file, or the suite, failed"
            said = f"{theirs if case.role.file else ours}, not the kernel: {one_line(error)}"
            verdict = Verdict(Status.HARNESS_ERROR, said, detail=traceback.format_exc())
    if verdict.status is Status.UNAVAILABLE:
        # What a backend says that it lacked does not decide whether a case takes more than this machine has.
        too_long = case.operations() > MOST_OPERATIONS.get(kind, inf)
        too_large = too_long or memory_need(case, kind) > memory.whole_memory(subject.device)
        verdict = replace(verdict, too_large=too_large)
    seconds, evidence = round(time.perf_counter() - began, 4), dict[str, str]()
    if "backend" in vars(trial):
        told = subject.executor.query(partial(_evidence_of, trial.backend), dict[str, str])
        evidence = {"kernel_evidence": f"raised {told.error}"} if told.error else told.value
    record = Record.begun(subject.backend, case, context.salt).with_fields(evidence=evidence)
    return trial, record.with_verdict(verdict, seconds)


def _require_memory(trial: Trial) -> None:
    device = trial.subject.device
    need, whole = memory_need(trial.case, device.type), memory.whole_memory(device)
    lacking = f"out of memory: may need {need / 2**20:.0f} MiB,"
    if need > whole:
        trial.settle(Verdict(Status.UNAVAILABLE, f"{lacking} this device has {whole / 2**20:.0f} MiB"))
    if memory.free_memory(device) < need:
        trial.context.forget()
        trial.subject.executor.make_room()
    if (free := memory.wait_for_memory(device, need, MEMORY_PATIENCE)) < need:
        found = f"{free / 2**20:.0f} MiB are free after {MEMORY_PATIENCE:.0f} s"
        trial.settle(Verdict(Status.UNAVAILABLE, f"{lacking} {found}"))


def _evidence_of(instance: Any) -> dict[str, str]:
    return {cut(str(name)): cut(str(value)) for name, value in getattr(instance, "kernel_evidence", dict)().items()}
