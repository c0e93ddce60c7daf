"""The verdict over a plain function, by the judge that ``certify`` has: as data, or as a failed assertion."""

import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mla_conformance.api import own_tensors, own_tests
from mla_conformance.api.function_case import FunctionCase
from mla_conformance.api.kernels import LAST, Function, HandedInputs, find_torch_device, kernel_around, name_of
from mla_conformance.backends import decode, foreign, references
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis import explain, reach
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.engine.explainer import EXPLAINER
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import UNLIKE, ZERO, BudgetUse, Nonconformance, Record, Status
from mla_conformance.problems.calls import AttentionCall, Problem
from mla_conformance.report import terminal
from mla_conformance.report.causes import advice, symptom
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial, judged_trial
from mla_conformance.vocabulary.capabilities import find_capability

_STRICTEST = Declaration()
_INDENT = " " * 5
_MARGIN = 8  # columns that pytest puts before each line of a message
_NAMED = " " * len("AssertionError: ")  # what pytest puts before the first line, beside the margin
# By test function and the name of what is judged: what the numbers of some failures give away, and the kinds of those
# of which one was compared with all known mistakes.
_FINDINGS: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
_LOOKED_FOR: set[tuple[str, str, str]] = set()


@dataclass(frozen=True, repr=False)
class FunctionVerdict:
    """What was found of a function on a case."""

    status: Status  # pass, fail, unsupported or unavailable (by device or memory), or harness_error
    case: str  # its id
    call: str  # which call it is about, such as ``decode``
    check: str  # what failed, such as ``lse``; empty if nothing did
    where: Mapping[str, int]  # request, query, head and column of the worst element, as far as there is one
    used: BudgetUse  # largest share of the error budget, by rule; 1 is the limit
    message: str  # of a failure what is wrong and what it looks like, with a line that runs it again; empty of a pass
    detail: str  # the traceback of a function that raised

    @property
    def passed(self) -> bool:
        """Whether the function is right on this case."""
        return self.status is Status.PASS

    def __repr__(self) -> str:
        return self.message or f"{self.status} {self.case}"


@dataclass(frozen=True, kw_only=True)
class _FunctionSubject(Subject):
    kernel: Any  # a class of the case's role
    role: Role

    @property
    def roles(self) -> tuple[Role, ...]:
        return (self.role,)

    def missing_role(self, role: Role) -> list[str]:
        return [] if self.kernel.function is not results else ["only its own test calls it"]

    def class_of(self, role: Role) -> Any:
        return self.kernel

    @property
    def declarations(self) -> dict[str, Declaration]:
        return {str(self.role): self.kernel.declaration}

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

    It takes the named inputs of docs/python-api.md and returns (output, lse), or what an indexer returns; where it
    rounds is declared, by default in the strictest classes (SPEC 4.2). The device is as for ``case.inputs``.
    """
    subject = _subject(case.suite_case, function, find_torch_device(device), declaration)
    trial, record = judged_trial(subject, case.suite_case, Context())
    return _verdict(trial, record, name_of(function))


def assert_conforms(case: FunctionCase, *results: Any, declaration: Declaration = _STRICTEST) -> None:
    """Assert that these are right results of the inputs that ``case.inputs`` handed out last in this thread.

    They are output and LSE, or what an indexer returns; an LSE that the case does not ask for is left aside. It is an
    InputError if no inputs of this case were handed out.
    """
    __tracebackhide__ = True
    handed: HandedInputs | None = getattr(LAST, "handed", None)
    if handed is None or handed.problem.case != case.suite_case:
        got = f"those of {handed.problem.case.id} were handed out last" if handed else "nothing was handed out"
        raise InputError(f"assert_conforms: expected results of the inputs of {case}, but {got}; call x = "
                         "case.inputs(device) in the same test, and judge before the next case")  # fmt: skip
    # The results are there already; expected is what untouched inputs give.
    _require_right(handed.context.problem(case.suite_case, handed.problem.device), results, declaration, handed)


def assert_close(*results: Any, declaration: Declaration = _STRICTEST, **inputs: Any) -> None:
    """Assert that these are right results for your own tensors: no case, the same golden result, budget and judge.

    Results are output and LSE, or the output alone; scores or indices of an indexer; indices of a top-k. Inputs are
    what the kernel was called with, as it was before the call, by the names of docs/python-api.md, which tell what it
    is. It is an InputError, which names the input, if they do not fit together.
    """
    __tracebackhide__ = True
    given = results[0] if len(results) == 1 and isinstance(results[0], tuple | list) else results
    values = tuple(given[:1]) if len(given) == 2 and given[1] is None else tuple(given)
    if not 1 <= len(values) <= 2:
        raise InputError(f"assert_close: expected an output, or an output and its LSE, got {len(values)} results")
    _require_right(own_tensors.problem_of(inputs, lse=len(values) == 2), values, declaration)


def _require_right(
    problem: Problem, given: tuple[Any, ...], declaration: Declaration, handed: HandedInputs | None = None
) -> None:  # nothing is handed out of own tensors, which no line runs again
    __tracebackhide__ = True
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    (call,), case = problem.calls, problem.case
    context = handed.context if handed else Context()
    trial = Trial(_subject(case, results, problem.device, declaration), case, context)
    value = given[0] if len(given) == 1 else given
    if isinstance(call, AttentionCall) and not call.returns_lse:
        value = decode.output_of(value)
    changed = handed.before.changed() if handed else ()
    observation = Observation((Returned(value, call=call, out=handed.out if handed else None),), None, tuple(changed))
    try:
        trial.judged(problem, trial.context.expect(problem), observation)
        found = trial.verdict
    except Nonconformance as outcome:
        found = outcome.verdict
    record = Record(trial.subject.backend.name, "", case.capability, case.id, Status.HARNESS_ERROR)
    verdict = _verdict(trial, record.with_verdict(found, seconds=0.0), "your_function" if handed else "")
    if not verdict.passed:
        raise AssertionError(verdict.message)


def results(**inputs: Any) -> None:
    """Stands for a function that was called by its own test."""


def _subject(case: Case, function: Function, device: torch.device, declaration: Declaration) -> Subject:
    name, role = name_of(function), case.role
    kernel = kernel_around(function, role, declaration)
    return _FunctionSubject(references.BackendReference(name, name), device, kernel=kernel, role=role)


def _with_explanation(trial: Trial, record: Record) -> Record:
    """The record of a failure with what it looks like, unless its numbers say all or it is run again alone."""
    if not record.failed or ZERO in record.message or own_tests.is_alone():
        return record
    function = own_tests.running_test().partition("[")[0], trial.subject.backend.name
    if record.finding:
        _FINDINGS[function].add(record.finding)
    if record.finding or not record.is_wrong_number:
        return record
    if (kind := (*function, symptom(record))) not in _LOOKED_FOR:
        _LOOKED_FOR.add(kind)
        said = f"{foreign.cut(record.message)} · looking for mistakes like it; --no-explain leaves that out"
        own_tests.say_meanwhile(said)
    said = EXPLAINER.explain(function, explain.Failure.of(trial, record))
    same = (finding for finding in _FINDINGS[function] if said.casefold().startswith(finding.casefold()))
    return record.with_fields(explanation=next(same, said))


def _verdict(trial: Trial, record: Record, function: str) -> FunctionVerdict:
    """What was found, in lines that pytest need not break; with a function's name, also what runs the case again."""
    record = reach.with_reach(trial, record)
    record = _with_explanation(trial, record) if function else record
    width, test = terminal.columns() - _MARGIN, own_tests.running_test()
    if function:
        own_tests.JUDGED.append(record)
    lines = terminal.wrapped(f"FAIL {record.message}", width, _NAMED, _INDENT)
    lines[0] = lines[0].removeprefix(_NAMED)
    told = advice(record if function else record.with_fields(explanation=UNLIKE))
    for remark in filter(None, (*record.remarks, told)):
        lines += terminal.wrapped(remark, width, _INDENT, 2 * _INDENT)
    if heat := reach.heat_of(trial, record):
        shown = heat.curves(width - 2 * _MARGIN - len(heat.part))
        lines += [f"{_INDENT}{heat.part} {name:<9}{curve}" for name, curve in shown.items()]
    if test:
        lines.append(f"{_INDENT}replay: pytest {shlex.quote(test)}")
    elif function:
        case, device = FunctionCase(trial.case), str(trial.subject.device)
        lines.append(f"{_INDENT}replay: mla.judge({case!r}, {function}, device={device!r})")
    return FunctionVerdict(
        status=record.status,
        case=record.case,
        call=trial.case.call,
        check=str(record.check),
        where=MappingProxyType(record.where),
        used=BudgetUse(**record.shares),
        message=terminal.shown_lines("\n".join(lines)) if record.failed else record.message,
        detail=record.detail,
    )
