"""What is told of a kernel beside its verdict: when a row's bits are the same, and how its errors are spread."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.work import simpler
from mla_conformance.judging.record import Nonconformance
from mla_conformance.judging.traits import Answer, BitwiseAnswer, ErrorSpread, Question
from mla_conformance.problems import calls, operands
from mla_conformance.roles.definition import measure
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials import graph
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial, results

_TRIES = 24  # simpler cases that are tried of one that differs
_ASKED: Mapping[Role, tuple[str, ...]] = {  # fields of cases whose bits are compared, small ones first
    Role.PREFILL: ("heads=2;q=[5,9]", "heads=2;q=[130,1,40]", "q=[300,17,64,5]"),
    Role.DECODE: (
        "call=decode;heads=2;q=[1,1];kv=[5,40];page=64",
        "call=decode;q=[1,1,1];kv=[300,5,129];page=64",
        "call=decode;heads=16;q=[1x4];kv=[2000,64,700,17];page=64",
    ),
    Role.LAYER: (
        "call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[20,40];decodes=1",
        "call=layer;dims=32-16-32-64;heads=2;q=[20,9,1,1];kv=[130,300,200,17];decodes=2;workspace=2048",
    ),
    Role.SPARSE: (
        "call=sparse_decode;heads=16;q=[1,1];kv=[40,64];page=64;topk=64",
        "call=sparse_decode;heads=16;q=[1,1,1];kv=[300,5,1000];page=64;topk=512",
    ),
    Role.INDEXER: ("call=index_logits;heads=4;q=[1,1];kv=[63,5]", "call=index_logits;q=[2,1,1];kv=[100,3,700]"),
}
_CHANGES: Mapping[Question, tuple[str, str, tuple[Any, ...]]] = {
    Question.SPLITS: ("maxima {} times as large", "inflate", (2, 16, 100)),
    Question.CHUNKING: ("a workspace of {} tokens", "workspace", (64, 128, 1024)),
    Question.PAGES: ("other pages, {} of them unused", "spare", (4, 17)),
    Question.PADDING: ("padding of {}", "pad", (1, 3)),
    Question.GRAPH: ("replayed from a graph", "capability", ("cuda_graph",)),
    Question.PHASE: ("every request as a prefill", "decodes", (0,)),
    Question.RANKS: ("on two ranks", "ranks", (2,)),
}
"""Fields that leave a case's operands as they are: what a change is called, the field, and other values of it."""
_OF_LAYERS = (Question.CHUNKING, Question.PHASE, Question.RANKS)
DATA = ("normal", "needle", "hot_tail", "outliers", "large_logits", "tiny_values")
_FORMS: tuple[dict[str, Any], ...] = ({"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"cache": "fp8"})
_MEASURED: Mapping[Role, tuple[str, ...]] = {  # fields of cases whose errors are measured, for every form and data
    Role.PREFILL: ("q=[65,9];heads=4", "call=context_chunk;heads=4;q=[5,9];kv=[300,64]"),
    Role.DECODE: ("call=decode;q=[1,1,1];kv=[1000,64,5];page=64",),
    Role.LAYER: ("call=layer;q=[9,1];kv=[40,130];decodes=1",),
    Role.SPARSE: ("call=sparse_decode;heads=16;q=[1,1];kv=[700,64];page=64;topk=512",),
    Role.INDEXER: ("call=index_logits;q=[1,1];kv=[200,700]",),
}
_MOST = 1e9  # larger errors, and what is no number, are told as this


def begun(subject: Subject, context: Context, case: Case) -> Trial:
    """A trial of a case; a Nonconformance if it is not supported."""
    subject.executor.begin()
    trial = Trial(subject, case, context)
    trial.require_support()
    return trial


def bases(role: Role) -> tuple[Case, ...]:
    return tuple(Case.parse(f"batch_invariance:{fields}") for fields in _ASKED[role])


@dataclass(frozen=True)
class Variant:
    what: str
    problem: calls.Problem
    # numbers of the rows of the case that its rows are, in their order; all of them, first, where it is None
    rows: torch.Tensor | None = None
    against: calls.Problem | None = None  # what it is compared with, where that is not the case as it is


def variants(trial: Trial, question: Question) -> Iterator[Variant]:
    """Other ways to call for rows of a trial's case, as far as it can have them and they are supported."""
    is_layer, everyone = isinstance(trial.case, LayerCase), range(len(trial.case.q))
    if question is Question.REPEATS:
        yield from (Variant(f"call {number} of the same", trial.problem) for number in range(2, 9))
        return
    if question not in _CHANGES:
        decoding = trial.case.decoding if isinstance(trial.case, LayerCase) else ()
        for what, requests in _orders(question, everyone, decoding):
            with suppress(ValueError):  # a layer's workspace may be too small for them
                problem = trial.problem.regrouped(requests)
                yield Variant(what, problem, operands.rows_of(trial.problem.query_start_loc, requests))
        return
    words, name, values = _CHANGES[question]
    on_gpu = trial.subject.device.type == "cuda"
    is_asked = is_layer if question in _OF_LAYERS else on_gpu or question is not Question.GRAPH
    for value in values if is_asked else ():
        try:
            case = replace(trial.case, **{name: value})
        except (CaseError, TypeError):
            continue
        if not trial.unsupported(case):
            problem = trial.build(case)  # what is drawn may depend on padding, which is taken away again
            against = problem.regrouped(everyone) if question is Question.PADDING else None
            yield Variant(words.format(value), problem, against=against)


def _through_a_graph(backend: Any, problem: calls.Problem) -> Any:
    (call,) = problem.calls
    replay, _ = graph.capture(backend, call)
    return replay()


def _orders(question: Question, everyone: Sequence[int], decoding: Container[int]) -> list[tuple[str, list[int]]]:
    """Requests of a case in other batches; those that prefill stay before those that decode."""
    groups = [[each for each in everyone if (each in decoding) is decodes] for decodes in (False, True)]
    if question is Question.ALONE:
        return [(f"request {request} alone", [request]) for request in everyone]
    if question is Question.PLACE:
        return [
            ("the requests reversed", [request for group in groups for request in group[::-1]]),
            ("the first request moved to the end", [each for group in groups for each in (*group[1:], *group[:1])]),
        ]
    return [(f"each request {n} times", [each for group in groups for each in group * n]) for n in (2, 8, 33)]


def bitwise(subject: Subject, context: Context) -> tuple[BitwiseAnswer, ...]:
    roles = [ROLES[role] for role in subject.declarations if role in _ASKED]
    return tuple(_answer(subject, context, role, question) for role in roles for question in Question)


def _answer(subject: Subject, context: Context, role: Role, question: Question) -> BitwiseAnswer:
    compared, refused = 0, ""
    for case in bases(role):
        try:
            count, difference = _compared(subject, context, case, question)
        except Nonconformance as failure:
            refused = refused or str(failure)
            continue
        compared += count
        candidates, tried = simpler(case), 0  # the simplest case that is found to differ, one step after the other
        while difference and tried < _TRIES and (candidate := next(candidates, None)):
            tried += 1
            with suppress(Nonconformance):
                if told := _compared(subject, context, candidate, question)[1]:
                    case, difference, candidates = candidate, told, simpler(candidate)
        if difference:
            return BitwiseAnswer(question, role, Answer.NO, compared, f"{case.id}: {difference}")
    if compared:
        return BitwiseAnswer(question, role, Answer.YES, compared)
    return BitwiseAnswer(question, role, Answer.NOT_APPLICABLE, why=refused or "nothing of this role varies so here")


def _compared(subject: Subject, context: Context, case: Case, question: Question) -> tuple[int, str]:
    """How many variants were compared, and what differs, in words; columns that only one has do not count."""
    trial, count = begun(subject, context, case), 0
    first = _values(trial, Variant("", trial.problem))
    for count, variant in enumerate(variants(trial, question), start=1):
        expected = _values(trial, Variant("", variant.against)) if variant.against else first
        for name, mine, theirs in zip(("output", "LSE"), expected, _values(trial, variant), strict=False):
            rows = mine[: len(theirs)] if variant.rows is None else mine[variant.rows.to(mine.device)]
            width = min(rows.shape[-1], theirs.shape[-1])  # an indexer's scores may be wider in one of both
            a, b = rows[..., :width], theirs[: len(rows), ..., :width]
            whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
            differs = (a.contiguous().view(whole) != b.contiguous().view(whole)).flatten(1).any(dim=1)
            if bool(differs.any()):
                wrong = f"{int(differs.sum())} of {len(differs)} rows, first in row {int(differs.nonzero()[0])}"
                return count, f"{variant.what}, {name} differs in {wrong}"
    return count, ""


def _values(trial: Trial, variant: Variant) -> list[torch.Tensor]:
    case, problem = variant.problem.case, variant.problem
    backend = trial.backend if case == trial.case else trial.create(case)
    if case.capability == "cuda_graph":
        found = trial.call(variant.what, partial(_through_a_graph, backend, problem))
        output, *lse = found if isinstance(found, tuple | list) else [found]
    else:
        seen = trial.run(backend, problem)
        if seen.error:
            raise Nonconformance(replace(trial.verdict, message=f"{variant.what or trial.case.id}: {seen.error.error}"))
        output, *lse = results(seen)
    return [output.clone(), *(each.mT.clone() for each in lse)]


def accuracy(subject: Subject, context: Context) -> tuple[ErrorSpread, ...]:
    """Of every role of numbers with a budget that can run here, dtype and regime, as far as the backend supports it."""
    asked = product([ROLES[role] for role in subject.declarations if role in _MEASURED], _FORMS, DATA)
    found = (_spread(subject, context, role, form, data) for role, form, data in asked)
    return tuple(each for each in found if each)


def _spread(subject: Subject, context: Context, role: Role, form: dict[str, Any], data: str) -> ErrorSpread | None:
    parts = []
    for fields in _MEASURED[role]:
        try:
            case = replace(Case.parse(f"weights:{fields};data={data}"), **form)
        except (CaseError, TypeError):  # a role without a cache, or one that has no such layout
            break
        with suppress(Nonconformance):
            parts.append(_errors(subject, context, case))
    if not parts:
        return None
    dtype, quantiles = f"{case.dtype}, {form['cache']} cache" if "cache" in form else case.dtype, list[Any]()
    for errors in (torch.cat(each) for each in zip(*parts, strict=True)):
        ordered = errors.nan_to_num(nan=_MOST, posinf=_MOST).clamp(max=_MOST).sort().values
        quantiles.append(tuple(float(ordered[round(share * (len(ordered) - 1))]) for share in (0.5, 0.99, 1.0)))
    return ErrorSpread(role, dtype, data, len(parts), len(ordered), *quantiles)


def _errors(subject: Subject, context: Context, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] each, of the elements that may have an error: in units of the budget, and of the last place."""
    trial = begun(subject, context, case)
    expectation = trial.context.expect(trial.problem)
    seen = trial.run(trial.backend, trial.problem)
    measured = measure(trial.problem, expectation, seen, trial.declaration) if not seen.error else []
    if not measured:
        raise Nonconformance(trial.verdict)
    output, dtype = measured[0], torch.float32 if case.role is Role.INDEXER else trial.problem.output_dtype
    form = torch.finfo(dtype)
    error, counted = (output.got - output.golden).abs(), output.allowed > 0
    # What the last bit of each number is worth in its dtype; the least there is below the dtype's range.
    _, exponent = output.golden.abs().clamp(min=form.tiny).frexp()
    last_place = torch.exp2((exponent - 1).double()) * form.eps
    return (error / output.allowed)[counted].cpu(), (error / last_place)[counted].cpu()
