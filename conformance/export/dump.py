"""What a case was judged by, as files: operands, results, golden results, errors and budgets, and where errors are."""

from pathlib import Path
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation
from mla_conformance.driving.plain import parts_of, why_not_plain
from mla_conformance.driving.subject import Subject
from mla_conformance.export.failing import Watched, watched
from mla_conformance.export.literals import NotWritable
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.judging.judge import measure
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.verdict import Verdict
from mla_conformance.problems.calls import AttentionCall

_TENSORS, _README = "tensors.pt", "README.md"
_TOLD = """# {case}

{backend}: {verdict}

    import torch
    data = torch.load("tensors.pt", weights_only=True)

`data["operands"]` is what the backend was handed, in its memory layout; `data["returned"]` what it returned. By part:
`data["golden"]` the right result, `data["error"]` how far the returned one is from it, `data["budget"]` how far it may
be: outputs [rows, heads, columns], LSEs [heads, rows], all in float64. Parts: {parts}.
"""


def require_empty(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        InputError: it does, or it is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--dump {folder}: expected a new or an empty folder")


def dump(subject: Subject, case: Case, folder: Path) -> None:
    """Judge a case in this process, and write what that was by.

    Raises:
        InputError: there is nothing to write, or no room for it.
    """
    try:
        trial, verdict = watched(subject, case)
    except NotWritable as error:
        raise InputError(f"--dump: {error}") from error
    if trial.last is None or trial.ran is None:
        raise InputError(f"--dump: nothing was run, the verdict is {verdict.status}: {verdict.message}")
    data = {"case": case.id, "operands": trial.ran.caller_owned, **_judged(trial)}
    write_output(folder / _README, _told(subject, case, verdict, list(data["golden"])))
    try:
        torch.save(data, folder / _TENSORS)
    except OSError as error:
        raise InputError(f"{folder / _TENSORS}: cannot be written: {error.strerror}") from error


def _judged(trial: Watched) -> dict[str, dict[str, torch.Tensor]]:
    """Results, golden results, errors and budgets of what was judged last."""
    assert trial.last is not None
    seen = trial.last
    measured = measure(seen.problem, seen.expectation, seen.observation, trial.declaration)
    parts = dict(zip(_names(seen.problem.calls, len(measured)), measured, strict=True))
    return {
        "returned": _returned(seen.observation),
        "golden": {name: each.golden for name, each in parts.items()},
        "error": {name: _error(each) for name, each in parts.items()},
        "budget": {name: each.allowed for name, each in parts.items()},
    }


def _error(measured: Measured) -> torch.Tensor:
    """How far a result is off; 0 where both are -inf."""
    return torch.where(measured.got == measured.golden, 0.0, (measured.got - measured.golden).abs())


def _names(calls: Any, count: int) -> list[str]:
    """Names of the parts that are measured: outputs and LSEs of each call, then of all calls merged."""
    names = [
        f"{what} of {call.name}"
        for call in calls
        for what in (["output", "LSE"] if isinstance(call, AttentionCall) and call.judges_lse else ["output"])
    ]
    return [*names, "output merged", "LSE merged"][:count]


def _returned(observation: Observation) -> dict[str, torch.Tensor]:
    """The tensors that the calls returned."""
    return {
        f"{name} of {returned.call.name}": part
        for returned in observation.returned
        for name, part in zip(("output", "LSE"), parts_of(returned.value), strict=False)
        if not why_not_plain(part)
    }


def _told(subject: Subject, case: Case, verdict: Verdict, parts: list[str]) -> str:
    said = f"{verdict.status}: {verdict.message}" if verdict.message else verdict.status
    return _TOLD.format(case=case.id, backend=subject.name, verdict=said, parts=", ".join(parts) or "none was judged")
