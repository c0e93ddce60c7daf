"""Sessions: many calls of one instance, each a batch of its own, as an engine makes them.

One that is wrong is made again on a new instance, so that its failure says whether what came before it is the cause.
Other batches are drawn by the id of the case, so that a line that runs it again has the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice
from random import Random
from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases import cached, grammar
from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.driving.driver import Observation
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.record import Check, Nonconformance, Status
from mla_conformance.problems.calls import CallOnRanks, Problem
from mla_conformance.problems.fences import Buffers
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.compress.case import CompressCase
from mla_conformance.roles.definition import judge
from mla_conformance.roles.layer.call import LayerCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials.bounds import call_moved
from mla_conformance.trials.graph import MANY_BATCHES, WHOLE_LAYERS, prepare_each, small_batches
from mla_conformance.trials.trial import Trial, returned_bytes

_BATCHES = 14  # between the first call and the first again: a kernel may remember a dozen
_STEPS = 3
_LAYERS = 2  # behind the first one


class Session:
    def __init__(self, trial: Trial) -> None:
        self.trial, self._count, self._before = trial, 0, ""

    def call(self, problem: Problem, step: str, *, prepare: bool = True, in_place: bool = False) -> Observation:
        """Make one, and judge it, over operands at the addresses of those of other such calls if it is ``in_place``."""
        trial, expectation = self.trial, self.trial.context.expect(problem)
        seen = trial.run(trial.backend, problem, prepare, self._perform if in_place else None)
        before, self._before = self._before, step
        self._count += 1
        try:
            return trial.judged(problem, expectation, seen, step)
        except Nonconformance as outcome:
            if not before or outcome.verdict.status is not Status.FAIL:
                raise
            alone = self._alone(problem, expectation, seen)
            trial.verdict = outcome.verdict.with_more(f"call {self._count} of this instance, behind “{before}”{alone}")
            raise Nonconformance(trial.verdict) from None

    def is_as_new(self) -> None:
        """The first call has the bits that a new instance returns, if equal calls have equal bits."""
        trial = self.trial
        seen = self.call(trial.problem, f"first call again, behind {self._count} others", in_place=True)
        # What rows of padding hold, or logits behind a row's bound, is free.
        if not trial.declaration.deterministic or trial.case.pad or trial.case.call == Call.INDEX_LOGITS:
            return
        new = trial.run(trial.create(), trial.problem, perform=self._perform)
        what = f"call {self._count} of this instance has other bits than the same call of a new one"
        trial.require(returned_bytes(new) == returned_bytes(seen), Check.NONDETERMINISM, what)

    @cached_property
    def _perform(self) -> Any:
        return partial(call_moved, self.trial.query("buffers", Buffers))

    def _alone(self, problem: Problem, expectation: Golden, seen: Observation) -> str:
        trial, executor = self.trial, self.trial.subject.executor
        if seen.mutated or seen.device_lost or executor.lost(problem.device):
            return ""
        made = executor.query(partial(trial.subject.create, problem.case))
        if made.error:
            return ""
        alone = judge(problem, expectation, trial.run(made.value, problem), trial.declaration)
        return "; on a new instance it is " + ("right" if alone.status is Status.PASS else "wrong as well")


def session(trial: Trial) -> None:
    made, case = Session(trial), trial.case
    made.call(trial.problem, "first call")
    if case.role in (Role.CACHE, Role.COMPRESS):
        made.call(trial.build(case.varied()), "other lengths")
    else:  # what only a kernel that is prepared has, or one that attends
        layout = Layout.PACKED if case.layout != Layout.PACKED else Layout.SLICED
        made.call(trial.build(replace(case, layout=layout)), "same shapes in another memory layout")
        made.call(trial.build(case.varied()), "other lengths")
        made.call(trial.problem, "first call again")
        for number, batch in enumerate(_batches(case), 1):
            made.call(trial.build(batch), f"batch {number} of other lengths, of {len(batch.q)} requests")
        made.call(trial.problem, f"first call again, after {_BATCHES} other batches")
        _layers_of_a_step(made)
        _interleaved(trial, trial.build(case.varied()))
        _interleaved(trial, trial.build(replace(case, scale=2 * case.scale)), "of another softmax scale")
        if case.call in (Call.DECODE, Call.SPARSE_DECODE) and not getattr(case, "has_extra", False):
            made.call(_scale_cache(trial.problem, 2.0), "another k_scale, everything else the same")
        other = trial.build(replace(case, seed=case.seed + 2))
        made.call(_overwrite(trial.problem, other), "same addresses, other contents")
        trial.problem = trial.build()  # whose tensors hold other contents now
    for later, step in _steps_of_an_engine(case):
        if not trial.unsupported(later):
            made.call(trial.build(later), step, in_place=True)
    made.is_as_new()


def many_batches(trial: Trial) -> None:
    made, batches = Session(trial), list(small_batches(trial.case))
    made.call(trial.problem, "first call", in_place=True)
    for number, batch in enumerate(batches, 1):
        made.call(trial.build(batch), f"batch {number}, of {len(batch.q)} requests", in_place=True)
    # What has no room for all of them has lost the first ones, or the last.
    for number in (1, 2, MANY_BATCHES - 2, MANY_BATCHES - 1):
        made.call(trial.build(batches[number - 1]), f"batch {number} again, behind all {MANY_BATCHES}", in_place=True)
    made.is_as_new()


def layers_of_a_step(trial: Trial) -> None:
    made, first = Session(trial), trial.problem
    made.call(first, "the first layer")
    for number in range(2, 2 + _LAYERS):
        layer = trial.build(_of_a_layer(trial.case, number))
        layer = layer if trial.case.role in WHOLE_LAYERS else _over_metadata(layer, first)
        made.call(layer, f"prepared once, layer {number} with scales and contents of its own", prepare=False)
    for number in range(2, 2 + _LAYERS):
        layer = trial.build(_of_a_layer(trial.case, number))
        in_place = trial.case.role is Role.CACHE  # whose calls are judged by what stood there before, too
        layer = layer if in_place else _overwrite(first, layer)
        made.call(layer, f"prepared once, layer {number} at the same addresses", prepare=False, in_place=in_place)
    if trial.case.role is Role.SPARSE:  # as layers do whose selections share a buffer
        selected = _overwrite(layer, _selected_otherwise(layer))
        made.call(selected, "prepared once, lists without their first keys at the same addresses", prepare=False)


def _of_a_layer(case: Case, number: int) -> Case:
    """The same batch, as one of several layers has it."""
    own = case.defaults()
    data = (grammar.Data.INTEGERS, grammar.Data.NORMAL)[number % 2]
    fields: dict[str, Any] = {name: data for name in ("data", "latents") if name in own}
    fields |= {name: number * getattr(case, name) for name in ("kscale", "oscale") if name in own}
    return replace(case, **fields)


def _interleaved(trial: Trial, other: Problem, difference: str = "") -> None:
    both = ((trial.backend, trial.problem), (trial.create(other.case), other))
    golden = [trial.context.expect(problem) for _, problem in both]
    # In one step, so that metadata that they share are one object wherever it is carried out.
    pairs = [(instance, problem.calls[0]) for instance, problem in both]
    trial.query("prepare_metadata", partial(prepare_each, pairs))
    step = " ".join(filter(None, ("after another instance", difference, "was prepared")))
    for (instance, problem), expectation in zip(both, golden, strict=True):
        trial.judged(problem, expectation, trial.run(instance, problem, prepare=False), step)


def _batches(case: Case) -> Iterator[Case]:
    known = range(len(case.q))
    sizes = cycle((2 * len(known) + 1, len(known) + 1, 1, len(known) + 2, len(known)))
    for number, size in enumerate(islice(sizes, _BATCHES), 1):
        batch = case
        if case.role not in WHOLE_LAYERS:  # whose batch is bound to its order and workspace
            rows = Random(f"{case.id}|{size}").sample([*known] * -(-size // len(known)), size)
            q, kv = (tuple(lengths[row] for row in rows if lengths) for lengths in (case.q, case.kv))
            batch = replace(case, q=q, kv=kv, seed=case.seed + 100 + size)
        draw, seed = Random(f"{batch.id}|{number}"), batch.seed + 100 * number
        if batch.kv:
            yield replace(batch, kv=tuple(draw.randint(0, length) for length in batch.kv), seed=seed)
        else:
            yield replace(batch, q=tuple(draw.randint(min(1, length), length) for length in batch.q), seed=seed)


def _steps_of_an_engine(case: Case) -> Iterator[tuple[Case, str]]:
    last = (case.kv or case.q)[-1] + (case.q[-1] if case.kv else 0)
    to_page = case.page - last % case.page
    for number in (*range(_STEPS), to_page, to_page + 1):
        yield _later(case, number), f"step {number}: the same requests, {number} tokens on"
    if len(case.q) > 1:  # as many requests and tokens as in the step before, divided otherwise
        before, decoding = _later(case, to_page + 1), case.decoding
        kinds = [[n for n in range(len(case.q)) if (n in decoding) == kind] for kind in (True, False)]
        order = dict(pair for kind in kinds for pair in zip(kind, reversed(kind), strict=True))
        q, kv = (tuple(lengths[order[n]] for n in range(len(lengths))) for lengths in (before.q, before.kv))
        yield replace(before, q=q, kv=kv), "the same lengths in reverse order"
        fewer = replace(case, **case.without(range(len(case.q) - 1, len(case.q))))
        yield _later(fewer, to_page + 2), "the next step, without the last request"
    for number in range(1, _STEPS):
        yield _requeried(case, number), f"other numbers of new tokens, batch {number}"
    if case.kv and case.role not in WHOLE_LAYERS:
        yield replace(case, q=(max(case.q) + 1,) * len(case.q)), "one new token more for each request"
    yield _later(case, 1), "step 1 once more"


def _later(case: Case, tokens: int) -> Case:
    if not case.kv:
        return replace(case, q=tuple(length + tokens for length in case.q))
    later = replace(case, kv=tuple(length + tokens for length in case.kv))
    if not isinstance(later, cached.CachedCase):
        return later
    assert isinstance(case, cached.CachedCase)
    pages = [sum(-(-total // case.page) for total in each.totals) for each in (case, later)]
    least = int(isinstance(later, CompressCase) and max(later.totals) < later.ratio)  # of which no request has an entry
    return replace(later, spare=max(least, case.spare - pages[1] + pages[0]))


def _requeried(case: Case, number: int) -> Case:
    fixed = case.decoding
    lone = int(getattr(case, "order", "") == "decodes_first")  # a prefill has more, also where nothing decodes
    draw, least = Random(f"{case.id}|queries|{number}"), 1 + max((case.q[request] for request in fixed), default=lone)
    most = max(least, max(case.q)) + 2
    q = [n if request in fixed else draw.randint(least, most) for request, n in enumerate(case.q)]
    return replace(case, q=tuple(q))


def _layers_of_a_step(made: Session) -> None:
    """A batch prepared once, computed for several layers: each has contents of its own, and weights if it is whole."""
    trial, is_layer = made.trial, isinstance(made.trial.case, LayerCase)
    others = grammar.Data.NORMAL if trial.case.role is Role.SPARSE_LAYER else grammar.Data.OUTLIERS
    data = others if trial.case.data == grammar.Data.INTEGERS else grammar.Data.INTEGERS
    fields: dict[str, Any] = dict.fromkeys(("data", "latents") if is_layer else ("data",), data)
    contents: Any = replace(trial.case, **fields)
    first, other = trial.build(), trial.build(contents)
    if not is_layer:
        other = _over_metadata(other, first)
    made.call(first, "prepared once")
    made.call(other, "prepared once, another layer's operands and cache", prepare=False)
    overwritten = _overwrite(first, other)
    made.call(overwritten, "prepared once, other contents at the same addresses", prepare=False)
    if trial.case.role is Role.SPARSE:  # as layers do whose selections share a buffer
        selected = _overwrite(overwritten, _selected_otherwise(overwritten))
        made.call(selected, "prepared once, lists without their first keys at the same addresses", prepare=False)
    if not is_layer:
        _interleaved(trial, _over_metadata(other, trial.problem), "over the same metadata")
    elif isinstance(trial.problem.calls[0], LayerCall):
        # A layer of other weights gets the metadata that the first one's builder made, and its own builder makes none.
        problem = trial.build(replace(contents, model=contents.model + 1))
        layer, expectation = trial.create(problem.case), trial.context.expect(problem)
        made.call(trial.problem, "the first of two layers")
        trial.query("a second layer", partial(_lend, trial.backend, layer, problem))
        step = "the second of two layers, over the metadata of the first"
        trial.judged(problem, expectation, trial.run(layer, problem, prepare=False), step)
        made.call(trial.problem, "the first of two layers again", prepare=False)


def _lend(owner: Any, layer: Any, problem: Problem) -> None:
    problem.calls[0].load(layer)
    layer.metadata = owner.metadata


def _scale_cache(problem: Problem, factor: float) -> Problem:
    """The same decode with ``k_scale`` times a power of two, which only the keys of an fp8 cache know: exactly."""
    case: Any = problem.case
    meant, calls = factor if case.cache == "fp8" else 1.0, []
    for call in problem.attention:
        calls.append(replace(call.given_otherwise(k_scale=call.k_scale * factor), k=call.k * meant, v=call.v * meant))
    whole = problem.whole and replace(problem.whole, k=problem.whole.k * meant, v=problem.whole.v * meant)
    return replace(problem, key=f"{problem.key}|k_scale={factor}", calls=tuple(calls), whole=whole)


def _selected_otherwise(problem: Problem) -> Problem:  # lists that lack what stood in their first column
    case: Any = problem.case
    columns, calls = slice(1, case.topk), []

    def moved(lists: torch.Tensor) -> torch.Tensor:  # of the first cache, behind which those of the second stay
        none = torch.full_like(lists[:, :1], NO_KEY)
        return torch.cat((lists[:, columns], none, lists[:, columns.stop :]), dim=1)

    for call in problem.attention:
        assert call.selected is not None
        length = call.named["topk_length"]
        length = None if length is None else (length - 1).clamp(min=0)
        other = call.given_otherwise(topk_indices=moved(call.named["topk_indices"]), topk_length=length)
        calls.append(replace(other, selected=moved(call.selected)))
    whole = problem.whole
    if whole is not None and whole.selected is not None:
        whole = replace(whole, selected=moved(whole.selected))
    return replace(problem, key=f"{problem.key}|moved", calls=tuple(calls), whole=whole)


def _overwrite(problem: Problem, other: Problem) -> Problem:
    calls = tuple(mine.overwritten(theirs) for mine, theirs in zip(problem.calls, other.calls, strict=True))
    return replace(problem, key=other.key, calls=calls, whole=other.whole)


def _over_metadata(problem: Problem, owner: Problem) -> Problem:
    def over(call: Any, theirs: Any) -> Any:
        if isinstance(call, CallOnRanks):  # each has metadata of its own
            return call.of(tuple(map(over, call.parts, theirs.parts)))
        return replace(call, metadata=theirs.metadata)

    return replace(problem, calls=tuple(map(over, problem.calls, owner.calls)))
