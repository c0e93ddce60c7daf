"""What is done with a backend to decide a capability: the procedures that the table's entries name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NoReturn

import torch
from torch.nn.functional import pad

from mla_conformance.backends import declaration, roles
from mla_conformance.driving.driver import itself, merged_by_its_own, parts_of, states_of, why_not_plain
from mla_conformance.judging.record import REFUSED, Check, Status, Verdict
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import segments
from mla_conformance.reference.cache_layout import write_entries
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.definition import judge
from mla_conformance.roles.indexer.problem import IndexerCall
from mla_conformance.roles.prefill.problem import PrefillCall
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.trials.trial import Trial, results, returned_bytes

REPEATS = 20
_ENDS_AND_A_PAIR = 4  # requests of a batch that has two of them between its first and its last


def conforms(trial: Trial) -> None:
    trial.conforms()


def determinism(trial: Trial) -> None:
    first = returned_bytes(trial.conforms())
    for number in range(1, REPEATS):
        same = returned_bytes(trial.run(trial.backend, trial.problem)) == first
        trial.require(same, Check.NONDETERMINISM, f"repeat {number} of the same call returned other bits")


def batch_invariance(trial: Trial) -> None:
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
    trial.conforms(step="as given")
    everyone = list(range(len(trial.case.q)))
    orders = {"the requests were reversed": everyone[::-1]}
    if len(everyone) >= _ENDS_AND_A_PAIR:
        orders["requests 1 and 2 were swapped"] = [0, 2, 1, *everyone[3:]]
        orders["request 0 was moved to the end"] = [*everyone[1:], 0]
    for change, order in orders.items():
        trial.conforms(trial.problem.regrouped(order), step=f"after {change}")


def causal_prefix(trial: Trial) -> None:
    everyone = range(len(trial.case.q))
    for length in (1, 17, max(trial.case.q) - 1, max(trial.case.q)):
        trial.conforms(trial.problem.regrouped(everyone, length), step=f"the first {length} tokens of each request")


def split_invariance(trial: Trial) -> None:
    for workspace in (64, 128, 2048):
        trial.conforms(trial.build(replace(trial.case, workspace=workspace)), step=f"workspace of {workspace} tokens")


def merge_states(trial: Trial) -> None:
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    seen = trial.conforms(step="as the calls return them")
    if not (trial.case.is_merged and trial.case.own_merge):
        return
    states = states_of(problem, seen.returned)  # output [T, N, V] and LSE [N, T]
    states = [(o.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan), lse) for o, lse in states]
    step = partial(merged_by_its_own, trial.backend, problem.case.merges_in_place, states)
    what = "with NaN behind every LSE of -inf"
    trial.judged(problem, expectation, replace(seen, merged=trial.call(f"{what}: merge_attn_states", step)), what)


def v_linearity(trial: Trial) -> None:
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
    first = trial.conforms()
    before = returned_bytes(first)
    trial.conforms(trial.build(trial.case.varied()))
    executor = trial.subject.executor
    now = [replace(each, value=executor.call(partial(itself, each.kept)).value) for each in first.returned]
    same = returned_bytes(replace(first, returned=tuple(now))) == before
    trial.require(same, Check.STALE_RESULT, "a later call overwrote the result of an earlier one")
    trial.conforms()


def selection_order(trial: Trial) -> None:
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
    case: Any = trial.case
    trial.conforms(step="as given")
    if not trial.unsupported(replace(case, topk=2 * case.topk)):
        lists = [pad(call.topk_indices, (0, case.topk), value=NO_KEY) for call in trial.problem.calls]
        calls = [call.given_otherwise(topk_indices=x) for call, x in zip(trial.problem.calls, lists, strict=True)]
        trial.conforms(replace(trial.problem, calls=tuple(calls)), step="as many columns of -1 behind every list")


def selection_rows(trial: Trial) -> None:
    trial.conforms(step="as given")
    for row in range(trial.problem.query_start_loc[-1]):
        trial.conforms(_blanked(trial.problem, "row", row), step=f"row {row}, while no other names a key")


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
    reasons = trial.unsupported()
    if not reasons:
        trial.conforms()
    elif trial.case.role in (roles.Role.DECODE, roles.Role.SPARSE) and set(reasons) == {declaration.NO_LSE}:
        # Their interface does not ask for an LSE, so that there is nothing to refuse.
        trial.settle(Verdict(Status.UNSUPPORTED, declaration.NO_LSE))
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
        trial.settle(Verdict(Status.PASS, f"{REFUSED}{made.error}"))
        return
    observation = trial.run(made.value, problem)
    refused = observation.error
    if observation.device_lost and refused:  # whether it was refused or not: nothing is lost, written or left changed
        fail(Check.UNSAFE_REFUSAL, f"launched: {refused.error}")
    if observation.mutated:
        fail(Check.UNSAFE_REFUSAL, f"changed {', '.join(observation.mutated)}")
    out = refused.out if refused and not refused.out_of_memory else None
    if out and (written := out.written() + out.overrun()):
        fail(Check.UNSAFE_REFUSAL, f"wrote {written} bytes of or around out= before it raised")
    require_undisturbed(observation.disturbed)
    if refused and not refused.out_of_memory:
        trial.settle(Verdict(Status.PASS, f"{REFUSED}{refused.error}"))
        return
    verdict = judge(problem, expectation, observation, trial.declaration)
    if verdict.status is Status.UNAVAILABLE:
        trial.settle(verdict)
    if verdict.status is Status.PASS:
        fail(Check.UNDECLARED_SUPPORT, "it ran and returned a right result")
    fail(Check.UNSAFE_REFUSAL, "it ran and returned a wrong result")


# What spoiled values are, in turn; codes, which know no infinity, are never numbers.
_SPOILED = {"nan": "NaN", "inf": "infinities", "largest": "the largest numbers"}


def neighbours(trial: Trial) -> None:
    def spoil(call: KernelCall, request: int, kind: str) -> None:
        for tensor in call.query_operands():
            _spoil_rows(tensor, call.query_start_loc, request, kind)

    _each_spoiled(trial, "queries", spoil)


def neighbour_keys(trial: Trial) -> None:
    _each_spoiled(trial, "keys and values", spoil_keys)


def _each_spoiled(trial: Trial, what: str, spoil: Callable[[KernelCall, int, str], None]) -> None:
    first = trial.conforms(step="as given")
    clean = [[part.clone() for part in parts_of(returned.value)] for returned in first.returned]
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    for (request, rows), kind in zip(enumerate(segments(problem.query_start_loc)), cycle(_SPOILED), strict=False):
        spoiled = trial.build(trial.case)
        for call in spoiled.calls:
            spoil(call, request, kind)
        seen = trial.run(trial.backend, spoiled)
        # The rows of the spoiled request itself are not judged: those of the clean run stand in their place.
        returned = tuple(
            replace(part, value=_patched(part.value, parts, rows, part.call.token_dims, part.out))
            for part, parts in zip(seen.returned, clean, strict=False)
        )
        merged = seen.merged
        if merged is not None and first.merged is not None:
            merged = _patched(merged, first.merged, rows, KernelCall.token_dims)
        step = f"beside request {request}, whose {what} hold {_SPOILED[kind]}"
        trial.judged(problem, expectation, replace(seen, returned=returned, merged=merged), step)


def spoil_keys(call: KernelCall, request: int, kind: str) -> None:
    """Every key and value of a request: of a decode its entries of the cache."""
    if isinstance(call, PrefillCall):
        for tensor in (call.k, call.v):
            _spoil_rows(tensor, call.key_start_loc, request, kind)
    elif isinstance(call, DecodeCall):
        cache, page = call.kv_cache, call.kv_cache.shape[1]
        tokens = torch.arange(int(call.metadata.seq_lens_cpu[request]), device=cache.device)
        blocks = call.metadata.block_table[request].long()[tokens // page]
        entries = poison((len(tokens), cache.shape[2]), cache.dtype, cache.device, kind)
        # As bytes, since float8 cannot be indexed everywhere.
        cache.view(torch.uint8)[blocks, tokens % page] = entries.view(torch.uint8)
    elif isinstance(call, SparseCall | IndexerCall):
        if isinstance(call, SparseCall):
            stored, layout = call.stored, call.case.cache
        elif call.case.is_paged:
            stored, layout = call.given["k"], call.case.cache
        else:
            stored, layout = call.given["k"].unsqueeze(1), "auto"
        slots = call.slots[list(segments(call.key_start_loc))[request]].to(stored.device)
        write_entries(stored, poison((len(slots), stored.shape[-1]), stored.dtype, stored.device, kind), slots, layout)
    else:
        raise TypeError(f"expected a call whose keys are handed over, got a {type(call).__name__}")


def _spoil_rows(tensor: torch.Tensor, starts: Sequence[int], request: int, kind: str) -> None:
    rows = tensor[list(segments(starts))[request]]
    rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))


def _patched(
    value: Any, clean: Sequence[torch.Tensor], rows: slice, dims: Sequence[int], out: Guarded | None = None
) -> Any:
    """The parts of a result, which count tokens in ``dims``, with the rows of ``clean``; anything else as it is."""
    parts = parts_of(value)
    if any(map(why_not_plain, parts)) or [x.shape for x in parts] != [x.shape for x in clean]:
        return value
    # What lies in the output tensor that was handed in must stay there.
    given = out and out.storage.untyped_storage().data_ptr()
    patched = [part if part.untyped_storage().data_ptr() == given else part.clone() for part in parts]
    for mine, theirs, dim in zip(patched, clean, dims, strict=False):
        count = rows.stop - rows.start
        mine.narrow(dim, rows.start, count).copy_(theirs.narrow(dim, rows.start, count))
    return tuple(patched) if len(patched) > 1 else patched[0]
