"""CUDA graphs as engines use them, batches replayed in the buffers of a captured one; and calls on several streams.

On a device without graphs the replay is a call with the same buffers, so that all but the capture is judged there.
Calls are made here without the driver's synchronisation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from operator import getitem
from random import Random
from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.grammar import LARGEST, Data
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.record import Check
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.trials.trial import Trial

MANY_BATCHES = 132  # between two calls: a kernel may remember 128, or number what it has met in seven bits
_REQUESTS = (1, 2, 3, 5, 2, 4)  # of those, in turn
WHOLE_LAYERS = (Role.LAYER, Role.SPARSE_LAYER)
_PARTS = ("attention", "index")  # what metadata of a sparse layer consist of
_stream: Any = torch.cuda.Stream


class Graph:
    """A captured call with its buffers, the tensors of ``static``, where ``batch`` stood then; no batch is larger."""

    def __init__(self, trial: Trial, what: str, static: Problem, batch: Problem) -> None:
        self.static, self._trial = static, trial
        self._captured = trial.query(f"{what}: the call", partial(capture, trial.backend, self._load(batch)))

    def judge(self, problem: Problem, step: str) -> None:
        trial, (call,) = self._trial, problem.calls
        expectation, loaded = trial.context.expect(problem), self._load(problem)
        reached = [image.cache for image in loaded.written.values()]
        value = trial.call(f"{step}: the call", partial(replayed, self._captured, trial.backend, loaded), reached)
        for name, image in call.written.items():
            own = loaded.written[name].cache
            image.cache.copy_(own[: len(image.cache)])
            intact = torch.equal(own[len(image.cache) :].view(torch.uint8), self._behind[name])
            trial.require(intact, Check.WRITTEN, f"{step}: {name} was written where the batch has no block")
        # Behind them a prefill may leave anything; the rows of a decode are all there, those of padding among them.
        seen = observed(problem, cut(value, slice(call.q.shape[0])), call.wrong_writes())
        trial.judged(problem, expectation, seen, step)

    def _load(self, problem: Problem) -> KernelCall:
        """The static call, whose buffers now begin with a batch's; what is behind and the maxima stay as they were."""
        (static,), (call,) = self.static.calls, problem.calls
        theirs, written = call.owned(), {}
        for name, buffer in static.owned().items():
            buffer[tuple(slice(size) for size in theirs[name].shape)].copy_(theirs[name])
        self._behind = {}
        call.reset()
        for name, image in call.written.items():
            cache, blocks = static.written[name].cache, len(image.cache)
            cache[:blocks].copy_(image.cache)
            self._behind[name] = cache[blocks:].view(torch.uint8).clone()
            written[name] = replace(static.written[name], before=torch.empty(0, dtype=torch.uint8))
        return replace(static, metadata=_told(static.metadata, call.metadata), written=written)


def _told(buffers: Any, batch: Any) -> Any:
    said = {name: value for name, value in vars(batch).items() if name.endswith("_cpu") or name == "num_decodes"}
    parts = {name: _told(getattr(buffers, name), vars(batch)[name]) for name in _PARTS if name in vars(batch)}
    return replace(buffers, **said, **parts)


def graph(trial: Trial) -> None:
    """Two sizes captured by one instance, batches up to the larger and beyond it, then one of a token a request."""
    case = trial.case
    size, smaller = len(case.q), len(case.q) // 2

    def capturing(what: str, static: Problem) -> Graph:
        return Graph(trial, what, static, trial.build(captured_batch(static.case)))

    def replay(graph: Graph, requests: int, seed: int, step: str) -> None:
        graph.judge(trial.build(replayed_batch(graph.static.case, requests, seed)), step)

    whole = capturing("captured", trial.problem)
    half = capturing("captured once more", trial.build(replace(case, q=case.q[:smaller], kv=case.kv[:smaller])))
    replay(whole, size, 2, "a batch of the captured size, replayed")
    replay(half, smaller, 3, "the smaller graph, replayed after the larger")
    replay(whole, smaller + 1, 4, "one request more than the smaller graph has, replayed with padding")
    replay(half, 1, 5, "a single request, replayed with padding")
    larger = replace(case, q=(*case.q, case.q[0]), kv=(*case.kv, *case.kv[:1]))
    trial.conforms(trial.build(larger), step="one request more than any graph has, called")
    replay(whole, size, 6, "replayed after a call without a graph")
    # They are prepared and never called: values of a regime would take longer to draw than all else.
    others = [trial.build(replace(other, data=Data.NORMAL)) for other in small_batches(case)]
    # As an engine does for batches of which it has no graph: one may push out what a graph reads.
    trial.query("others are prepared", partial(prepare_each, [(trial.backend, other.calls[0]) for other in others]))
    replay(whole, size, 9, f"replayed after {len(others)} other batches were prepared")
    short = Graph(trial, "captured with a token a request", trial.build(), trial.build(_filled(case, 1, seed=7)))
    short.judge(trial.build(_filled(case, LARGEST, seed=8)), "many pages longer than captured, replayed")


def prepare_each(pairs: Iterable[tuple[Any, KernelCall]]) -> None:
    for instance, call in pairs:
        call.prepare(instance)


def sparse_layer_graph(trial: Trial) -> None:
    """Batches of every size up to the captured one, with padding behind them, and one beyond it without the graph."""
    case, size = trial.case, len(trial.case.q)
    if size < 2 or {*case.q} != {1}:
        raise CaseError(f"sparse_layer_graph expects two requests or more of one new token each, got q={[*case.q]}")

    def batch(requests: int, seed: int) -> Problem:  # some of them, in another order, some shorter; padding behind
        draw = Random(f"{case.id}|{requests}|{seed}")
        kv = tuple(draw.choice((length, length // 2)) for length in draw.sample(case.kv, requests))
        other: dict[str, Any] = {"q": (1,) * requests, "kv": kv, "decodes": requests, "pad": size - requests}
        return trial.build(replace(case, **other, seed=case.seed + seed))

    whole = Graph(trial, "captured", trial.build(replace(case, seed=case.seed + 9)), batch(size, 1))
    whole.judge(batch(size, 2), "a batch of the captured size, replayed")
    whole.judge(batch(size - 1, 3), "one request fewer, replayed with padding")
    whole.judge(batch(1, 4), "a single request, replayed with padding")
    whole.judge(trial.problem, "sequences as long as the buffers have room for, replayed after shorter ones")
    beyond: dict[str, Any] = {"q": (*case.q, 1), "kv": (*case.kv, 9), "decodes": size + 1}
    trial.conforms(trial.build(replace(case, **beyond)), step="one request more than captured, called")
    whole.judge(batch(size, 5), "replayed after a call without the graph")


def small_batches(case: Case) -> Iterator[Case]:
    for longest, requests in enumerate(islice(cycle(_REQUESTS), MANY_BATCHES), 1):
        draw, seed = Random(f"{case.id}|{longest}"), case.seed + 1000 + longest
        size = len(case.q) if case.role in WHOLE_LAYERS else requests
        lengths = [longest, *(draw.randint(1, min(longest, 4)) for _ in range(size - 1))]
        draw.shuffle(lengths)
        q = tuple(islice(cycle(case.q), size)) if case.kv else tuple(lengths)
        yield replace(case, q=q, kv=case.kv and tuple(lengths), seed=seed)


def captured_batch(case: Case) -> Case:
    return _with_lengths(case, [-(-length // 2) for length in reversed(_lengths(case))], padding=0, seed=1)


def _filled(case: Case, most: int, seed: int) -> Case:  # as long as the buffers have room for, or of ``most``
    return _with_lengths(case, [min(most, length) for length in _lengths(case)], padding=0, seed=seed)


def replayed_batch(case: Case, requests: int, seed: int) -> Case:
    """A batch that fits the buffers of ``case``: so many requests, and padding up to the captured number.

    Rows grow and shrink from replay to replay; one is as long as when it was captured, one has no token, one a single.
    """
    if case.role is not Role.PREFILL and max(case.q) > 1:
        requests = len(case.q)  # a row of padding has one token, so that such a batch is never smaller
    draw, rooms = Random(f"{case.id}|{requests}|{seed}"), _lengths(case)[::-1]
    order = draw.sample(range(len(rooms)), len(rooms))
    special = draw.sample(range(requests), min(3, requests - 1))
    for row in special[:1]:  # its own room is the one that the captured length fits
        there = order.index(row)
        order[row], order[there] = row, order[row]
    lengths = [draw.choice((rooms[room], draw.randint(min(1, rooms[room]), rooms[room]))) for room in order[:requests]]
    for row, length in zip(special, (-(-rooms[order[special[0]]] // 2) if special else 0, 0, 1), strict=False):
        lengths[row] = min(length, rooms[order[row]])
    return _with_lengths(case, lengths, len(case.q) - requests, seed)


def _lengths(case: Case) -> tuple[int, ...]:  # what differs between the batches of a graph
    return case.q if case.role is Role.PREFILL else case.kv


def _with_lengths(case: Case, lengths: list[int], padding: int, seed: int) -> Case:
    if case.role is Role.PREFILL:
        return replace(case, q=(*lengths, *(0,) * padding), seed=case.seed + seed)
    return replace(case, q=case.q[: len(lengths)], kv=tuple(lengths), pad=padding, seed=case.seed + seed)


_Captured = tuple[Callable[[], Any], Any]  # (replay, what the captured call returned); the replay returns it again


def capture(backend: Any, call: KernelCall) -> _Captured:
    call.prepare(backend)
    return captured(call.q.device, partial(call.invoke, backend, None))


def replayed(graph: _Captured, backend: Any, call: KernelCall) -> Any:
    replay, value = graph
    for tensor in tensors(value):
        tensor.fill_(torch.nan)
    call.prepare(backend)
    return replay()


def captured(device: torch.device, call: Callable[[], Any]) -> _Captured:
    """A call in a graph; on a device without graphs the replay is the call."""
    if device.type != "cuda":
        return call, call()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is compiled or allocated then is in no graph
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = call()

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize(device)
        return value

    return replay, value


_SPIN_CYCLES = 20_000_000  # about 10 ms of a GPU: longer than any launch and any copy of a case
_POISON_BYTE = 0xFF
_ROUNDS = 5
_spin: Any = torch.cuda._sleep


def streams(trial: Trial) -> None:
    """Inputs produced on a side stream, the call and the reading of its result on the same one; then two at once."""
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    trial.call("before the stream: the call", partial(prepared_call, trial.backend, problem))
    late = trial.query("on a side stream: the call", partial(_late_calls, [trial.backend], [problem]))
    value = trial.call("on a side stream: the call", partial(getitem, late, 0))
    trial.judged(problem, expectation, observed(problem, value), "inputs produced late on a side stream")
    # Two instances, each with its own problem on its own stream, launched one after the other and never waited for.
    problems, backends = [problem, trial.build(trial.case.varied())], [trial.backend, trial.create()]
    golden = [trial.context.expect(problem) for problem in problems]
    for problem, backend in zip(problems, backends, strict=True):
        # What is compiled or allocated at a first call is no part of the question.
        trial.call("before the streams: the call", partial(prepared_call, backend, problem))
    for number in range(_ROUNDS):
        late = trial.query("on two streams at once: the call", partial(_late_calls, backends, problems))
        for index, (problem, expectation) in enumerate(zip(problems, golden, strict=True)):
            value = trial.call("on two streams at once: the call", partial(getitem, late, index))
            step = f"two instances on two streams, round {number}"
            trial.judged(problem, expectation, observed(problem, value), step)


def _late_calls(backends: Sequence[Any], problems: Sequence[Problem]) -> list[Any]:
    """What each instance returned on a stream of its own, all of them launched before any is waited for.

    The inputs of each are taken away now and given back on its stream, after that has spun for a while: a kernel that
    is launched on another stream, or a result that is ready only there, is computed from what stands in their place.
    """
    device, returned = problems[0].device, []
    streams = [_stream(device) for _ in problems]
    inputs = [
        [(x, storage_bytes(x).clone()) for x in owned.values() if x.is_cuda and x.untyped_storage().nbytes()]
        for owned in (problem.caller_owned for problem in problems)
    ]
    for backend, problem, kept, stream in zip(backends, problems, inputs, streams, strict=True):
        for tensor, _ in kept:  # poison in the operands; no request has a token
            storage_bytes(tensor).fill_(_POISON_BYTE if tensor.is_floating_point() else 0)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _spin(_SPIN_CYCLES)
            for tensor, data in kept:
                storage_bytes(tensor).copy_(data)
            value = prepared_call(backend, problem)
            # Read where the caller would read it: what is written later, or elsewhere, is not in the copy.
            copies = [tensor.clone() for tensor in tensors(value)]
        if isinstance(value, torch.Tensor):
            value = copies[0]
        elif isinstance(value, tuple | list) and len(copies) == len(value):
            value = tuple(copies)
        returned.append(value)
    torch.cuda.synchronize(device)
    return returned


def prepared_call(backend: Any, problem: Problem) -> Any:  # of a problem's only one; possibly still being computed
    problem.calls[0].prepare(backend)
    return problem.calls[0].invoke(backend, None)


def tensors(value: Any) -> list[torch.Tensor]:
    found = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def cut(value: Any, rows: slice) -> Any:
    """These rows of an output [T, N, V], and of an LSE [N, T] if there is one; anything else as it is."""
    parts = tensors(value)
    if isinstance(value, torch.Tensor):
        return value[rows]
    whole = isinstance(value, tuple | list) and parts and len(parts) == len(value)
    return (parts[0][rows], *(lse[..., rows] for lse in parts[1:])) if whole else value


def observed(problem: Problem, value: Any, miswritten: str = "") -> Observation:
    return Observation((Returned(value, call=problem.calls[0], miswritten=miswritten),), None, ())
