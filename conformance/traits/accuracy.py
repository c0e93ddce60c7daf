"""How the errors of a kernel's output elements are spread: in units of their budget, and of the last place."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.judging.traits import ErrorSpread
from mla_conformance.judging.verdict import Nonconformance
from mla_conformance.roles.table import measure
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial

DATA = ("normal", "needle", "hot_tail", "outliers", "large_logits", "tiny_values")
_FORMS: tuple[dict[str, Any], ...] = ({"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"cache": "fp8"})
_FIELDS: Mapping[Role, tuple[dict[str, Any], ...]] = {
    Role.PREFILL: ({"q": (65, 9), "heads": 4}, {"call": Call.CONTEXT_CHUNK, "q": (5, 9), "kv": (300, 64), "heads": 4}),
    Role.DECODE: ({"call": Call.DECODE, "q": (1, 1, 1), "kv": (1000, 64, 5), "page": 64},),
    Role.LAYER: ({"call": Call.LAYER, "q": (9, 1), "kv": (40, 130), "decodes": 1},),
    Role.SPARSE: ({"call": Call.SPARSE_DECODE, "heads": 16, "page": 64, "q": (1, 1), "kv": (700, 64), "topk": 512},),
    Role.INDEXER: ({"call": Call.INDEX_LOGITS, "q": (1, 1), "kv": (200, 700)},),
}
_QUANTILES = (0.5, 0.99, 1.0)
_MOST = 1e9  # larger errors, and what is no number, are told as this


def accuracy(subject: Subject, context: Context) -> tuple[ErrorSpread, ...]:
    """Of every role of numbers with a budget that can run here, dtype and regime, as far as the backend supports it."""
    asked = product([ROLES[role] for role in subject.declarations if role in _FIELDS], _FORMS, DATA)
    found = (_spread(subject, context, role, form, data) for role, form, data in asked)
    return tuple(each for each in found if each)


def _spread(subject: Subject, context: Context, role: Role, form: dict[str, Any], data: str) -> ErrorSpread | None:
    """Of all elements of the cases of one role, dtype and regime together; None where none is supported."""
    parts = []
    for fields in _FIELDS[role]:
        try:
            case = Case.of(capability="weights", data=data, **fields, **form)
        except (CaseError, TypeError):  # a role without a cache, or one that has no such layout
            break
        try:
            parts.append(_errors(subject, context, case))
        except Nonconformance:
            continue
    if not parts:
        return None
    budget, ulp = (torch.cat(errors) for errors in zip(*parts, strict=True))
    dtype = f"{case.dtype}, {form['cache']} cache" if "cache" in form else case.dtype
    return ErrorSpread(role, dtype, data, len(parts), len(budget), _quantiles(budget), _quantiles(ulp))


def _errors(subject: Subject, context: Context, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] each, of the elements that may have an error: in units of the budget, and of the last place.

    It is a Nonconformance if the case is unsupported or its call failed.
    """
    subject.executor.begin()
    trial = Trial(subject, case, context)
    trial.require_support()
    expectation = trial.context.expect(trial.problem)
    seen = trial.run(trial.backend, trial.problem)
    measured = measure(trial.problem, expectation, seen, trial.declaration) if not seen.error else []
    if not measured:
        raise Nonconformance(trial.verdict)
    dtype = torch.float32 if case.role is Role.INDEXER else trial.problem.output_dtype
    output = measured[0]
    error, counted = (output.got - output.golden).abs(), output.allowed > 0
    return (error / output.allowed)[counted].cpu(), (error / last_place(output.golden, dtype))[counted].cpu()


def last_place(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the last bit of each number of ``x``, float64, is worth in a dtype; the least there is below its range."""
    form = torch.finfo(dtype)
    _, exponent = x.abs().clamp(min=form.tiny).frexp()
    return torch.exp2((exponent - 1).double()) * form.eps


def _quantiles(errors: torch.Tensor) -> tuple[float, float, float]:
    ordered = errors.nan_to_num(nan=_MOST, posinf=_MOST).clamp(max=_MOST).sort().values
    median, tail, worst = (float(ordered[round(share * (len(ordered) - 1))]) for share in _QUANTILES)
    return median, tail, worst
