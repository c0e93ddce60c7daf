"""Wrong numbers: where they are, in words, as far as it is regular, and as a map; and how alike those of two are."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.heat_map import BEYOND, MOST, HeatMap, is_mapped
from mla_conformance.judging.record import Check, Record
from mla_conformance.judging.steps import Measured
from mla_conformance.problems import memory, operands
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.definition import measure
from mla_conformance.trials.trial import Observed, Trial

_SHAPES = re.compile(r"expected output of shape \[(\d+, \d+, \d+)\], got \[(\d+, \d+, \d+)\]")
_SWAPPED = "tokens and heads are swapped"
_SEVERAL = 2
_MANY = 6  # requests of which no bound tells wrong ones from right ones by chance
_TELLING = 3  # queries of a request of which one differs from the others
_Rows = Sequence[list[bool]]  # of each request whether each of its queries is wrong


def compared(seen: Observed, declaration: Declaration) -> dict[str, Measured]:
    """What was compared, by name: output and LSE of each call, then of all calls merged; of attention alone."""
    calls = [call for call in seen.problem.calls if isinstance(call, AttentionCall)]
    if not calls:
        return {}
    names = [f"{what} of {call.name}" for call in calls for what in ("output", "LSE")[: 1 + call.returns_lse]]
    return dict(zip([*names, "output merged", "LSE merged"], numbers_of(seen, declaration), strict=False))


def heat_maps(parts: dict[str, Measured]) -> list[HeatMap]:
    """A map of each output [T, N, V], of which the worst column counts, and of each LSE [N, T], unless it is empty."""
    maps = []
    for name, part in parts.items():
        if part.got.numel():
            error = torch.where(part.got == part.golden, 0.0, (part.got - part.golden).abs())
            share = torch.where(error == 0, 0.0, error / part.allowed).nan_to_num(torch.inf, torch.inf)
            by_head = share.amax(dim=-1).mT if share.dim() > 2 else share
            heads, rows = by_head.shape
            cells = min(heads, MOST), min(rows, MOST)
            largest = torch.nn.functional.adaptive_max_pool2d(by_head[None].double().contiguous(), cells)[0]
            digits = largest.log10().ceil().clamp(0, BEYOND).int().tolist()
            maps.append(HeatMap(name, heads, rows, tuple("".join(map(str, line)) for line in digits)))
    return maps


def heat_of(trial: Trial, record: Record) -> HeatMap | None:
    """The map of the part that has most cells over their budget, of a trial that failed by a wrong number.

    None where no element that was judged last is over its own, as where only the RMS of a row is, or memory runs out.
    """
    if not is_mapped(record) or trial.last is None:
        return None
    try:
        maps = heat_maps(compared(trial.last, trial.declaration))
    except (MemoryError, RuntimeError) as error:
        if memory.out_of_memory(error):
            return None
        raise
    return max((each for each in maps if each.wrong), key=lambda each: each.wrong, default=None)


def with_reach(trial: Trial, record: Record) -> Record:
    """The record of a failed trial, whose message says where wrong numbers are, or what a wrong form is the form of."""
    said = ""
    try:
        if record.check == Check.SHAPE:
            said = of_form(record.message, trial.case)
        elif record.is_wrong_number and trial.last is not None:
            said = "; ".join(_reach(trial, record))
    except Exception as error:  # such as for want of memory: what is said of a failure changes no verdict
        said = f"which rows are wrong was not compared: {type(error).__name__}"
    clause = f" (SPEC {record.clause})"
    return record.with_fields(message=f"{record.message.removesuffix(clause)}; {said}{clause}") if said else record


def _reach(trial: Trial, record: Record) -> Iterator[str]:
    assert trial.last is not None
    problem, rows = trial.last.problem, trial.last.expectation.rows
    if rows.numbers is not None or not all(isinstance(call, AttentionCall) for call in problem.calls):
        return
    numbers = numbers_of(trial.last, trial.declaration)
    parts = [each for each in numbers if record.check != Check.LSE or each.got.dim() == 2]
    outputs = [each for each in parts if each.got.dim() > 2 and each.got.shape[0] == each.got.shape[1]]
    swapped = (Measured(each.got.transpose(0, 1), each.golden, each.allowed) for each in outputs)
    if outputs and not any(bool(wrong_numbers(each).any()) for each in swapped):
        yield _SWAPPED
        return
    wrong = next((mask for mask in map(wrong_numbers, parts) if bool(mask.any())), None)
    if wrong is None:
        return
    keys = [sum(lens) for lens in zip(*(call.key_lens for call in problem.calls), strict=True)]

    def by_request(mask: torch.Tensor) -> _Rows:
        affected = mask.flatten(1).any(dim=1) if mask.dim() > 2 else mask.any(dim=0)  # an LSE is [N, T]
        found = [affected[part].tolist() for part in operands.segments(rows.start_loc)]
        return [each if number else [] for each, number in zip(found, keys, strict=True)]  # what sees keys

    found = by_request(wrong)
    yield from list(of_queries([each for each in found if each]))[:1]
    yield from list(of_requests(found, keys, problem.case))[:1]
    if record.check == Check.MASK and isinstance(problem.case, DecodeCase):
        # A request with full pages has no token slot of its own that may not be read.
        for place, each in enumerate(by_request(parts[0].got.isnan())):
            if each and all(each) and not keys[place] % problem.case.page:
                yield (
                    f"request {place} fills its last page, so that blocks of others are read: look at the block table, "
                    "at what is read past its end, and at strides"
                )
                return


def of_form(message: str, case: Case) -> str:
    """What was returned in place of what a message about a form expects; empty where that is not known."""
    if "expected 2 tensor(s)" in message and case.role in (Role.PREFILL, Role.DECODE, Role.SPARSE):
        return "the results are (output, LSE)"
    if not (found := _SHAPES.search(message)):
        return ""
    want, got = ([int(size) for size in shape.split(",")] for shape in found.groups())
    if got == [want[1], want[0], want[2]]:
        return _SWAPPED
    if isinstance(case, CachedCase) and got[2] == sum(case.latent_dims) > want[2]:
        return f"it has the rope columns as well: V is the first kv_lora_rank = {want[2]} columns of an entry"
    return ""


def of_queries(found: _Rows) -> Iterator[str]:
    """Which query of every request is the only right or wrong one, or from which one on they are wrong."""
    longest = max(map(len, found), default=0)
    for value, what in ((False, "right"), (True, "wrong")):
        for place, name in ((-1, "last"), (0, "first")):
            alone = ([*each[:place], *each[place:][1:]] for each in found)
            if longest >= _TELLING and all(
                each[place] is value and value not in others for each, others in zip(found, alone, strict=True)
            ):
                yield f"in each request exactly the {name} query is {what}"
    begin = min((each.index(True) for each in found if True in each), default=0)
    reached = [each for each in found if len(each) > begin]
    if begin and len(reached) >= _SEVERAL and all(each == [at >= begin for at in range(len(each))] for each in found):
        yield f"in each request the queries from {begin} on are wrong"


def of_requests(found: _Rows, keys: Sequence[int], case: Case) -> Iterator[str]:
    """Of requests that are wrong or right as a whole, what all wrong ones or all right ones have, or which is alone."""
    asked = [place for place, each in enumerate(found) if each]
    wrong = [place for place in asked if all(found[place])]
    right = [place for place in asked if not any(found[place])]
    if not wrong or not right or len(wrong) + len(right) < len(asked):
        return
    if min(len(wrong), len(right)) >= _SEVERAL:
        kinds = {
            "an empty context": [place for place in asked if case.kv[place : place + 1] == (0,)],
            "several query tokens": [place for place in asked if len(found[place]) > 1],
        }
        if isinstance(case, DecodeCase):
            partial = [place for place in asked if keys[place] % case.page]
            kinds[f"a last page of {case.page} tokens that is not full"] = partial
        for kind, places in kinds.items():
            if places in (wrong, right):
                yield f"exactly the requests with {kind} are {'wrong' if places == wrong else 'right'}"
        least, most = (min(keys[place] for place in wrong), max(keys[place] for place in right))
        if least > most and len(asked) >= _MANY:
            yield f"exactly the requests with {least} keys or more are wrong, those with {most} or fewer are right"
    for places, what in ((right, "right"), (wrong, "wrong")):
        if len(places) == 1 and len(asked) > _SEVERAL:
            yield f"only request {places[0]} is {what}"


_ROUNDED = 2**-7
"""Part of a row's error by which two kernels that make the same mistake may differ: P and the output are rounded to
2^-9 of themselves in bf16, each by both."""


@dataclass(frozen=True)
class Behaviour:
    failure: tuple[str, str, str]  # what failed and where in the procedure; empty if the case passed
    # every output and LSE of the step that was judged last; none where they have not the right form
    numbers: tuple[Measured, ...]

    @staticmethod
    def of(trial: Trial, record: Record) -> "Behaviour":
        if not record.failed or trial.last is None:
            return Behaviour(("", "", ""), ())
        step = record.message.partition(":")[0]
        return Behaviour((record.check, step, trial.last.problem.key), tuple(numbers_of(trial.last, trial.declaration)))

    @property
    def is_numeric(self) -> bool:
        return any(bool((wrong_numbers(each) & each.got.isfinite()).any()) for each in self.numbers)


def numbers_of(seen: Observed, declaration: Declaration) -> list[Measured]:
    return measure(seen.problem, seen.expectation, seen.observation, declaration)


def likeness(observed: Behaviour, suspected: Behaviour) -> float:
    """1 for the same failure, 0 for none of it; both from the same case."""
    alike = observed.failure == suspected.failure and len(observed.numbers) == len(suspected.numbers)
    if not alike or not observed.numbers:
        return 0.0
    return min(_alike(mine, theirs) for mine, theirs in zip(observed.numbers, suspected.numbers, strict=True))


def _alike(a: Measured, b: Measured) -> float:
    """Likeness of one output or LSE; 1 where neither is wrong. What the observed kernel may round decides for both."""
    wrong = wrong_numbers(a) | _differ(b.got, b.golden, a.allowed)
    margin, error = 2 * a.allowed, a.got - a.golden
    if a.got.dim() > 2:  # what roundings of a wrong output [T, N, V] may make of each row's numbers
        rms = torch.where(error.isfinite(), error, 0.0).square().mean(dim=-1, keepdim=True).sqrt()
        margin = margin + _ROUNDED * rms
    unlike = _differ(a.got, b.got, margin) & wrong
    if not bool(wrong.any()):
        return 1.0
    counted = 1.0 - float(unlike.sum()) / float(wrong.sum())
    whole = _norm(error, wrong)
    return min(counted, 1.0 - _norm(a.got - b.got, unlike) / whole if whole else counted)


def wrong_numbers(measured: Measured) -> torch.Tensor:
    return _differ(measured.got, measured.golden, measured.allowed)


def _differ(x: torch.Tensor, y: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    finite = x.isfinite() & y.isfinite()
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(finite, (x - y).abs() > allowed, ~same)


def _norm(difference: torch.Tensor, where: torch.Tensor) -> float:
    return float(torch.where(where & difference.isfinite(), difference, 0.0).norm())
