"""What a case was judged by, as files: operands, results, golden results, errors and budgets, and where errors are."""

from pathlib import Path

import torch

from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.heat import compared, heat_maps
from mla_conformance.driving.driver import parts_of, why_not_plain
from mla_conformance.export.failing import called
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.report.heat_picture import picture_file
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject

_TENSORS, _README = "tensors.pt", "README.md"
_TOLD = """# {case}

{backend}: {verdict}

    import torch
    data = torch.load("tensors.pt", weights_only=True)

`data["operands"]` is what the backend was handed, in its memory layout; `data["returned"]` what it returned. By part:
`data["golden"]` the right result, `data["error"]` how far the returned one is from it, `data["budget"]` how far it may
be: outputs [rows, heads, columns], LSEs [heads, rows], all in float64. Pictures of where they are over their budget:
{pictures}.
"""


def require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--dump {folder}: expected a new or an empty folder")


def dump(subject: Subject, case: Case, folder: Path, salt: str = "") -> None:
    """Judge a case in this process, on inputs of this salt, and write what that was by."""
    trial, record = judged_trial(subject, case, Context(salt))
    if trial.last is None:
        raise InputError(f"--dump: nothing was run, the verdict is {record.status}: {record.message}")
    parts = compared(trial.last, trial.declaration)
    pictures = {f"{each.part.replace(' ', '-')}.svg": picture_file(each) for each in heat_maps(parts)}
    verdict, drawn = (f"{record.status}: {record.message}" if record.message else record.status), ", ".join(pictures)
    told = _TOLD.format(case=case.id, backend=record.backend, verdict=verdict, pictures=drawn or "none was compared")
    for name, text in ({_README: told} | pictures).items():
        write_output(folder / name, text)
    returned = {
        f"{name} of {each.call.name}": part
        for each in trial.last.observation.returned
        for name, part in zip(("output", "LSE"), parts_of(each.value), strict=False)
        if not why_not_plain(part)
    }
    data = {
        "case": case.id,
        "operands": called(trial.last).caller_owned,
        "returned": returned,
        "golden": {name: part.golden for name, part in parts.items()},
        "error": {  # how far a result is off; 0 where both are -inf
            name: torch.where(part.got == part.golden, 0.0, (part.got - part.golden).abs())
            for name, part in parts.items()
        },
        "budget": {name: part.allowed for name, part in parts.items()},
    }
    try:
        torch.save(data, folder / _TENSORS)
    except OSError as error:
        raise InputError(f"{folder / _TENSORS}: cannot be written: {error.strerror}") from error
