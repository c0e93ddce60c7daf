"""What is done with a backend to decide a capability: the procedures that the table's entries name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.roles import Role
from mla_conformance.driving.driver import as_it_is_now, merged_by_its_own, states_of
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.operands import segments
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.table import judge
from mla_conformance.trials import graph
from mla_conformance.trials.bounds import memory_bounds
from mla_conformance.trials.far import judge_far_away
from mla_conformance.trials.layers import layer_graph, loads_packed, moves_blocks, shapes_cache, sparse_layer_graph
from mla_conformance.trials.neighbours import neighbour_keys, neighbours
from mla_conformance.trials.session import many_batches, session
from mla_conformance.trials.transform import (
    half_lists,
    lonely_row,
    regroup,
    reversed_lists,
    scale_values,
    widened_lists,
)
from mla_conformance.trials.trial import Trial, observed, prepared_call, results, returned_bytes, tensors

REPEATS = 20
_ENDS_AND_A_PAIR = 4
"""Requests of a batch that has two of them between its first and its last."""


def determinism(trial: Trial) -> None:
    """The same call again and again."""
    first = returned_bytes(trial.conforms())
    for number in range(1, REPEATS):
        same = returned_bytes(trial.run(trial.backend, trial.problem)) == first
        trial.require(same, Check.NONDETERMINISM, f"repeat {number} of the same call returned other bits")


def batch_invariance(trial: Trial) -> None:
    """Each request alone beside the whole batch, then two without those around them."""
    whole = results(trial.conforms())
    for request, rows in enumerate(segments(trial.problem.query_start_loc)):
        alone = results(trial.conforms(regroup(trial.problem, [request]), step=f"request {request} alone"))
        if trial.declaration.batch_invariant:
            pairs = zip(whole, alone, trial.problem.calls[0].token_dims, strict=False)
            same = all(torch.equal(x.narrow(dim, rows.start, rows.stop - rows.start), y) for x, y, dim in pairs)
            trial.require(same, Check.BATCH_DEPENDENCE, f"request {request} alone has other bits than in its batch")
    if len(trial.case.q) >= _ENDS_AND_A_PAIR:
        trial.conforms(regroup(trial.problem, [1, 2]), step="requests 1 and 2 without the others")


def request_order(trial: Trial) -> None:
    """The requests in other orders: everything, only what stands between the ends, or all places, but no neighbours."""
    trial.conforms(step="as given")
    everyone = list(range(len(trial.case.q)))
    orders = {"the requests were reversed": everyone[::-1]}
    if len(everyone) >= _ENDS_AND_A_PAIR:
        orders["requests 1 and 2 were swapped"] = [0, 2, 1, *everyone[3:]]
        orders["request 0 was moved to the end"] = [*everyone[1:], 0]
    for change, order in orders.items():
        trial.conforms(regroup(trial.problem, order), step=f"after {change}")


def causal_prefix(trial: Trial) -> None:
    """Requests cut to their first tokens."""
    everyone = range(len(trial.case.q))
    for length in (1, 17, max(trial.case.q) - 1, max(trial.case.q)):
        trial.conforms(regroup(trial.problem, everyone, length), step=f"the first {length} tokens of each request")


def split_invariance(trial: Trial) -> None:
    """The same context in other chunks."""
    for workspace in (64, 128, 2048):
        other = trial.build(replace(trial.case, workspace=workspace))
        trial.conforms(other, step=f"workspace of {workspace} tokens")


def merge_states(trial: Trial) -> None:
    """The backend's merge of the states that its calls return, then with NaN behind every LSE of -inf."""
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    seen = trial.conforms(step="as the calls return them")
    if not (trial.case.is_merged and trial.case.own_merge):
        return
    states = states_of(problem, seen.returned)  # output [T, N, V] and LSE [N, T]
    states = [(o.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan), lse) for o, lse in states]
    step = partial(merged_by_its_own, trial.backend, problem.case.merges_in_place, states)
    what = "with NaN behind every LSE of -inf"
    merged = trial.call(f"{what}: merge_attn_states", step)
    trial.judged(problem, expectation, replace(seen, merged=merged), what)


def v_linearity(trial: Trial) -> None:
    """Values times powers of two."""
    output, *lse = results(trial.conforms())
    for factor in (-2.0, 0.25):
        scaled, *same_lse = results(trial.conforms(scale_values(trial.problem, factor), step=f"V × {factor:g}"))
        exact = torch.equal(scaled, output * factor)
        trial.require(exact, Check.NONLINEARITY, f"V × {factor:g} does not give exactly {factor:g} × the output")
        trial.require(all(map(torch.equal, lse, same_lse)), Check.NONLINEARITY, f"V × {factor:g} changes the LSE")


def no_side_effects(trial: Trial) -> None:
    """What was returned stays as it was, whatever is called later."""
    first = trial.conforms()
    before = returned_bytes(first)
    trial.conforms(trial.other_problem())
    same = returned_bytes(as_it_is_now(first, trial.subject.executor)) == before
    trial.require(same, Check.STALE_RESULT, "a later call overwrote the result of an earlier one")
    trial.conforms()


def selection_order(trial: Trial) -> None:
    """The lists as given and the other way round, then each half of every list."""
    trial.conforms(step="as given")
    trial.conforms(reversed_lists(trial.problem), step="every list reversed")
    if not trial.case.is_merged:
        for half, said in enumerate(("first", "second")):
            trial.conforms(half_lists(trial.problem, half), step=f"every second key of each list, from the {said} on")


def selection_padding(trial: Trial) -> None:
    """The lists as given, and with as many columns of -1 behind them, if the backend takes lists so wide."""
    case = trial.case
    assert isinstance(case, SparseCase)
    trial.conforms(step="as given")
    if not trial.unsupported(replace(case, topk=2 * case.topk)):
        trial.conforms(widened_lists(trial.problem, case.topk), step="as many columns of -1 behind every list")


def selection_rows(trial: Trial) -> None:
    """Each row while all others name nothing."""
    trial.conforms(step="as given")
    for row in range(trial.problem.query_start_loc[-1]):
        trial.conforms(lonely_row(trial.problem, row), step=f"row {row}, while no other names a key")


def cache_write(trial: Trial) -> None:
    """A layer's writes, its cache's shape, and its copies of blocks."""
    trial.conforms()
    shapes_cache(trial)
    moves_blocks(trial)


def weight_absorption(trial: Trial) -> None:
    """Weights as loaded, replaced in place, and stored in codes."""
    trial.conforms()
    trial.conforms(
        trial.build(replace(trial.case, seed=trial.case.seed + 2)), step="after the weights were replaced in place"
    )
    loads_packed(trial)


def prefill_decode_agreement(trial: Trial) -> None:
    """The same tokens by both paths."""
    assert isinstance(trial.case, LayerCase)
    trial.conforms(step="as decodes")
    trial.conforms(trial.build(replace(trial.case, decodes=0)), step="the same tokens as prefills")


def refuses_or_conforms(trial: Trial) -> None:
    """What a backend declares unsupported must be refused before anything is launched; what it declares must run."""
    reasons = trial.unsupported()
    if not reasons:
        trial.conforms()
    elif trial.case.role in (Role.DECODE, Role.SPARSE) and set(reasons) == {NO_LSE}:
        # Their interface does not ask for an LSE, so that there is nothing to refuse.
        trial.settle(Verdict(Status.UNSUPPORTED, NO_LSE))
    else:
        must_refuse(trial, "; ".join(reasons))


def must_refuse(trial: Trial, declared: str) -> None:
    """The backend rejects this configuration, so a call must raise before it launches anything."""
    problem = trial.problem  # built outside: an input that cannot be built is no refusal
    expectation = trial.context.expect(problem)

    def fail(check: Check, what: str) -> NoReturn:
        trial.fail(check, f"declared unsupported ({declared}), but {what}")

    def require_undisturbed(disturbed: tuple[str, ...]) -> None:
        if disturbed:
            trial.disturbed = True
            fail(Check.PROCESS_STATE, f"changed the process: {'; '.join(disturbed)}")

    made = trial.subject.executor.query(partial(trial.subject.create, trial.case))
    require_undisturbed(made.disturbed)
    if made.error:
        trial.settle(Verdict(Status.PASS, f"refused: {made.error}"))
        return
    observation = trial.run(made.value, problem)
    refused = observation.error
    # Whether it was refused or not: nothing is lost, written or left changed.
    if observation.device_lost and refused:
        fail(Check.UNSAFE_REFUSAL, f"launched: {refused.error}")
    if observation.mutated:
        fail(Check.UNSAFE_REFUSAL, f"changed {', '.join(observation.mutated)}")
    out = refused.out if refused and not refused.out_of_memory else None
    if out and (written := out.written() + out.overrun()):
        fail(Check.UNSAFE_REFUSAL, f"wrote {written} bytes of or around out= before it raised")
    require_undisturbed(observation.disturbed)
    if refused and not refused.out_of_memory:
        trial.settle(Verdict(Status.PASS, f"refused: {refused.error}"))
        return
    verdict = judge(problem, expectation, observation, trial.declaration)
    if verdict.status is Status.UNAVAILABLE:
        trial.settle(verdict)
    if verdict.status is Status.PASS:
        fail(Check.UNDECLARED_SUPPORT, "it ran and returned a right result")
    fail(Check.UNSAFE_REFUSAL, "it ran and returned a wrong result")


_SPIN_CYCLES = 20_000_000
"""About 10 ms of a GPU: longer than any launch and any copy of a case."""
_POISON_BYTE = 0xFF
_ROUNDS = 5
_stream: Any = torch.cuda.Stream
_spin: Any = torch.cuda._sleep


def streams(trial: Trial) -> None:
    """Inputs produced on a side stream, the call and the reading of its result on the same one; then two at once."""
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    trial.call("before the stream: the call", partial(prepared_call, trial.backend, problem))
    late = trial.query("on a side stream: the call", partial(_late_calls, [trial.backend], [problem]))
    value = trial.call("on a side stream: the call", partial(_result, late, 0))
    trial.judged(problem, expectation, observed(problem, value), "inputs produced late on a side stream")
    # Two instances, each with its own problem on its own stream, launched one after the other and never waited for.
    problems, backends = [problem, trial.other_problem()], [trial.backend, trial.create()]
    golden = [trial.context.expect(problem) for problem in problems]
    for problem, backend in zip(problems, backends, strict=True):
        # What is compiled or allocated at a first call is no part of the question.
        trial.call("before the streams: the call", partial(prepared_call, backend, problem))
    for number in range(_ROUNDS):
        late = trial.query("on two streams at once: the call", partial(_late_calls, backends, problems))
        for index, (problem, expectation) in enumerate(zip(problems, golden, strict=True)):
            value = trial.call("on two streams at once: the call", partial(_result, late, index))
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


def _result(values: Sequence[Any], index: int) -> Any:
    return values[index]


PROCEDURES: Mapping[str, Callable[[Trial], object]] = {
    procedure.__name__: procedure
    for procedure in (
        Trial.conforms, session, many_batches, determinism, batch_invariance, request_order, causal_prefix,
        split_invariance, merge_states, v_linearity, no_side_effects, cache_write, weight_absorption,
        prefill_decode_agreement, streams, layer_graph, sparse_layer_graph,
        neighbours, neighbour_keys, memory_bounds, refuses_or_conforms,
        selection_order, selection_padding, selection_rows,
    )
} | {
    "graph": graph.replays,
    "far": judge_far_away,
}  # fmt: skip
"""Procedures by the names that entries of the vocabulary give them."""
