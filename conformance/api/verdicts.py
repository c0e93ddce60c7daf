"""The verdict over a plain function, by the judge that ``certify`` has: as data, or as a failed assertion."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mla_conformance.api.function_case import FunctionCase
from mla_conformance.api.inputs import HandedInputs, find_torch_device, handed_last
from mla_conformance.api.kernels import Function, kernel_around, name_of
from mla_conformance.api.looks_like import with_explanation
from mla_conformance.api.own_tests import JUDGED, replay_of, running_test
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.decode import output_of
from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import BudgetUse, Nonconformance, Status
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.report.causes import advice
from mla_conformance.report.terminal import columns, shown_lines, wrapped
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial
from mla_conformance.vocabulary.capabilities import find_capability

_STRICTEST = Declaration()
_INDENT = " " * 5
_MARGIN = 8
"""Columns that pytest puts before each line of a message."""
_NAMED = " " * len("AssertionError: ")
"""What pytest puts before the first line, beside the margin."""


@dataclass(frozen=True, repr=False)
class FunctionVerdict:
    """What was found of a function on a case.

    Attributes:
        status: ``pass``, ``fail``, ``unsupported`` or ``unavailable`` (by device or memory) or ``harness_error``.
        case: the case id.
        call: which call it is about, such as ``decode``.
        check: what failed, such as ``lse``; empty if nothing did.
        where: request, query, head and column of the worst element, as far as there is one.
        used: largest share of the error budget, by rule; 1 is the limit.
        message: of a failure what is wrong and what it looks like, with a line that runs it again; empty of a pass.
        detail: the traceback of a function that raised.
    """

    status: Status
    case: str
    call: str
    check: str
    where: Mapping[str, int]
    used: BudgetUse
    message: str
    detail: str

    @property
    def passed(self) -> bool:
        """Whether the function is right on this case."""
        return self.status is Status.PASS

    def __repr__(self) -> str:
        return self.message or f"{self.status} {self.case}"


@dataclass(frozen=True, kw_only=True)
class FunctionSubject(Subject):
    """A kernel that is known by its class alone, since nothing has to load it again.

    Attributes:
        kernel: a class of the case's role.
        role: the role.
    """

    kernel: Any
    role: Role

    @property
    def roles(self) -> tuple[Role, ...]:
        """The only role."""
        return (self.role,)

    def missing_role(self, case: Case) -> list[str]:
        """Nothing, unless the function was called by its own test, so that no other case can be tried."""
        return [] if self.kernel.function is not results else ["only its own test calls it"]

    def class_of(self, role: Role) -> Any:
        """The only class."""
        return self.kernel

    def declaration_of(self, role: Role) -> Declaration:
        """What was said of the function."""
        declared: Declaration = self.kernel.declaration
        return declared

    def unsupported(self, case: Case) -> list[str]:
        """What a case needs of device and declaration; whoever asks for one case has the time that it takes."""
        capability = find_capability(case.capability)
        if capability.needs_cuda and self.device.type != "cuda":
            return ["needs a CUDA device"]
        lacks = capability.needs and not getattr(self.kernel.declaration, capability.needs)
        return [f"not declared {capability.needs}"] if lacks else []


def judge(
    case: FunctionCase, function: Function, *, device: str | torch.device = "", declaration: Declaration = _STRICTEST
) -> FunctionVerdict:
    """The verdict over a function on a case, with as many calls as the case's capability takes.

    Args:
        case: the case.
        function: takes the named inputs of docs/python-api.md, returns (output, lse), or what an indexer returns.
        device: as for ``case.inputs``.
        declaration: where the function rounds; by default the strictest classes (SPEC 4.2).

    Raises:
        InputError: no such device.
    """
    subject = _subject(case.suite_case, function, find_torch_device(device), declaration)
    trial, record = judged_trial(subject, case.suite_case, Context())
    where = f", device={str(subject.device)!r}"
    return _verdict(trial, record, f"mla.judge({case!r}, {name_of(function)}{where})")


def assert_conforms(case: FunctionCase, *results: Any, declaration: Declaration = _STRICTEST) -> None:
    """Assert that these are right results of the inputs that ``case.inputs`` handed out last in this thread.

    Args:
        case: the case.
        results: output and LSE, or what an indexer returns; an LSE that the case does not ask for is left aside.
        declaration: as for :func:`judge`.

    Raises:
        AssertionError: they are wrong; the message says how, and what that looks like.
        InputError: no inputs of this case were handed out.
    """
    __tracebackhide__ = True
    handed = handed_last(case.suite_case)
    verdict = _judged(handed, results, declaration)
    if not verdict.passed:
        raise AssertionError(verdict.message)


def _judged(handed: HandedInputs, given: tuple[Any, ...], declaration: Declaration) -> FunctionVerdict:
    device, case = handed.problem.device, handed.case
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    trial = Trial(_subject(case, results, device, declaration), case, handed.context)
    record = _record(trial, handed, given)
    return _verdict(trial, record, f"x = {FunctionCase(case)!r}.inputs({str(device)!r})")


def _record(trial: Trial, handed: HandedInputs, given: tuple[Any, ...]) -> Record:
    """The record of results that are there already; expected is what untouched inputs give."""
    problem = handed.context.problem(trial.case, handed.problem.device)
    (call,) = problem.calls
    value = given[0] if len(given) == 1 else given
    if isinstance(call, AttentionCall) and not call.returns_lse:
        value = output_of(value)
    observation = Observation((Returned(call, value, out=handed.out),), None, tuple(handed.before.changed()))
    try:
        trial.judged(problem, trial.expect(problem), observation)
        verdict = trial.verdict
    except Nonconformance as outcome:
        verdict = outcome.verdict
    blank = Record(trial.subject.name, "", trial.case.capability, trial.case.id, Status.HARNESS_ERROR)
    return blank.with_verdict(verdict, seconds=0.0)


def results(**inputs: Any) -> None:
    """Stands for a function that was called by its own test."""


def _subject(case: Case, function: Function, device: torch.device, declaration: Declaration) -> Subject:
    name, role = name_of(function), case.role
    kernel = kernel_around(function, role, declaration)
    return FunctionSubject(BackendReference(name, name), device, kernel=kernel, role=role)


def _verdict(trial: Trial, record: Record, expression: str) -> FunctionVerdict:
    record = with_explanation(trial, record)
    JUDGED.append(record)
    return FunctionVerdict(
        status=record.status,
        case=record.case,
        call=trial.case.call,
        check=str(record.check),
        where=MappingProxyType(record.where),
        used=BudgetUse(**record.shares),
        message=shown_lines("\n".join(_failure(record, expression))) if record.failed else record.message,
        detail=record.detail,
    )


def _failure(record: Record, expression: str) -> Iterator[str]:
    """What failed, in lines that pytest need not break; what it looks like; what runs it again, which names the case.

    Args:
        record: of the failure.
        expression: what runs it again outside of pytest.
    """
    first, *further = wrapped(f"FAIL {record.message}", columns() - _MARGIN, _NAMED, _INDENT)
    yield from (first.removeprefix(_NAMED), *further)
    for remark in filter(None, (*record.remarks, advice(record))):
        yield from wrapped(remark, columns() - _MARGIN, _INDENT, 2 * _INDENT)
    test = running_test()
    yield f"{_INDENT}replay: {replay_of(test) if test else expression}"
