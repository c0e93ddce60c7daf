"""What is done with a backend to decide a capability: the procedures that the table's entries name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import torch

from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.roles import Role
from mla_conformance.driving.driver import as_it_is_now, merged_by_its_own, states_of
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.operands import segments
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.table import judge
from mla_conformance.trials.trial import Trial, results, returned_bytes

REPEATS = 20
_ENDS_AND_A_PAIR = 4  # requests of a batch that has two of them between its first and its last


def conforms(trial: Trial) -> None:
    """One call."""
    trial.conforms()


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
        alone = results(trial.conforms(trial.problem.regrouped([request]), step=f"request {request} alone"))
        if trial.declaration.batch_invariant:
            pairs = zip(whole, alone, trial.problem.calls[0].token_dims, strict=False)
            same = all(torch.equal(x.narrow(dim, rows.start, rows.stop - rows.start), y) for x, y, dim in pairs)
            trial.require(same, Check.BATCH_DEPENDENCE, f"request {request} alone has other bits than in its batch")
    if len(trial.case.q) >= _ENDS_AND_A_PAIR:
        trial.conforms(trial.problem.regrouped([1, 2]), step="requests 1 and 2 without the others")


def request_order(trial: Trial) -> None:
    """The requests in other orders: everything, only what stands between the ends, or all places, but no neighbours."""
    trial.conforms(step="as given")
    everyone = list(range(len(trial.case.q)))
    orders = {"the requests were reversed": everyone[::-1]}
    if len(everyone) >= _ENDS_AND_A_PAIR:
        orders["requests 1 and 2 were swapped"] = [0, 2, 1, *everyone[3:]]
        orders["request 0 was moved to the end"] = [*everyone[1:], 0]
    for change, order in orders.items():
        trial.conforms(trial.problem.regrouped(order), step=f"after {change}")


def causal_prefix(trial: Trial) -> None:
    """Requests cut to their first tokens."""
    everyone = range(len(trial.case.q))
    for length in (1, 17, max(trial.case.q) - 1, max(trial.case.q)):
        trial.conforms(trial.problem.regrouped(everyone, length), step=f"the first {length} tokens of each request")


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
    """Values times powers of two, which is exact."""
    problem = trial.problem
    output, *lse = results(trial.conforms())
    for factor in (-2.0, 0.25):
        calls = tuple(replace(call, v=call.v * factor) for call in problem.attention)
        times = replace(problem, key=f"{problem.key}|values={factor}", calls=calls)
        scaled, *same_lse = results(trial.conforms(times, step=f"V × {factor:g}"))
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
    calls = []
    for call in trial.problem.calls:  # every list reversed up to its length: what it means stays the same
        columns = torch.arange(call.topk_indices.shape[1], device=call.topk_indices.device)
        length = torch.tensor(len(columns)) if call.topk_length is None else call.topk_length.long().unsqueeze(1)
        order = torch.where(columns < length, length - 1 - columns, columns).expand_as(call.topk_indices)
        calls.append(call.given_otherwise(topk_indices=call.topk_indices.gather(1, order)))
    trial.conforms(replace(trial.problem, calls=tuple(calls)), step="every list reversed")
    if not trial.case.is_merged:
        for half, said in enumerate(("first", "second")):
            halved = _blanked(trial.problem, "half", half)
            trial.conforms(halved, step=f"every second key of each list, from the {said} on")


def selection_padding(trial: Trial) -> None:
    """The lists as given, and with as many columns of -1 behind them, if the backend takes lists so wide."""
    case = trial.case
    assert isinstance(case, SparseCase)
    trial.conforms(step="as given")
    if not trial.unsupported(replace(case, topk=2 * case.topk)):
        calls = []
        for call in trial.problem.calls:
            behind = call.topk_indices.new_full((len(call.topk_indices), case.topk), NO_KEY)
            calls.append(call.given_otherwise(topk_indices=torch.cat((call.topk_indices, behind), dim=1)))
        wider = replace(trial.problem, calls=tuple(calls))
        trial.conforms(wider, step="as many columns of -1 behind every list")


def selection_rows(trial: Trial) -> None:
    """Each row while all others name nothing."""
    trial.conforms(step="as given")
    for row in range(trial.problem.query_start_loc[-1]):
        lonely = _blanked(trial.problem, "row", row)
        trial.conforms(lonely, step=f"row {row}, while no other names a key")


def _blanked(problem: Problem, name: str, number: int) -> Problem:
    """The lists of the first cache with one half of their keys, every second column, or with those of one row alone."""
    calls = []
    for call in problem.calls:
        columns = torch.arange(call.topk_indices.shape[1], device=call.topk_indices.device)
        rows = torch.arange(len(call.topk_indices), device=columns.device).unsqueeze(1)
        kept = columns % 2 == number if name == "half" else rows == number
        counted = kept.expand_as(call.topk_indices)
        own, rest = call.selected.tensor_split([len(columns)], dim=1)
        selected = torch.cat((own.masked_fill(~counted, NO_KEY), rest), dim=1)
        if call.topk_length is not None:
            counted = counted | (columns >= call.topk_length.unsqueeze(1))
        blank: Any = call.given_otherwise(topk_indices=call.topk_indices.masked_fill(~counted, NO_KEY))
        calls.append(replace(blank, selected=selected))
    return replace(problem, key=f"{problem.key}|{name}={number}", calls=tuple(calls))


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


_HERE = (
    *(conforms, determinism, batch_invariance, request_order, causal_prefix, split_invariance, merge_states),
    *(v_linearity, no_side_effects, selection_order, selection_padding, selection_rows, refuses_or_conforms),
)
PROCEDURES: dict[str, str] = {
    **dict.fromkeys((procedure.__name__ for procedure in _HERE), "procedures"),
    **dict.fromkeys(("session", "many_batches"), "session"),
    **dict.fromkeys(("cache_write", "weight_absorption", "prefill_decode_agreement", "layer_graph"), "layers"),
    **dict.fromkeys(("graph", "sparse_layer_graph", "streams"), "graph"),
    **dict.fromkeys(("neighbours", "neighbour_keys"), "neighbours"),
    **dict.fromkeys(("memory_bounds", "far"), "bounds"),
}
"""Procedures by the names that entries of the vocabulary give them, and the modules of this room that hold them."""


def procedure_of(name: str) -> Callable[[Trial], object]:
    found: Callable[[Trial], object] = getattr(import_module(f"{__package__}.{PROCEDURES[name]}"), name)
    return found
