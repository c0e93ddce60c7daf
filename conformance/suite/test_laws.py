"""Laws that relate several runs: state, order, batches, chunks, and the multiples of a value."""

from dataclasses import replace

import pytest
import torch

from mla_conformance.judging.verdict import Check
from mla_conformance.problems.build import build_problem
from mla_conformance.problems.operands import segments
from mla_conformance.problems.transform import overwrite, regroup, scale_values
from mla_conformance.trials.trial import Trial, results, returned_bytes

REPEATS = 20


@pytest.mark.capability("call_order")
def test_call_order(trial: Trial) -> None:
    trial.conforms(step="first call")
    trial.conforms(trial.relaid_problem(), step="same shapes in another memory layout")
    trial.conforms(trial.other_problem(), step="other lengths")
    trial.conforms(step="first call again")
    trial.interleaved(trial.other_problem())
    trial.conforms(overwrite(trial.problem, trial.redrawn_problem()), step="same addresses, other contents")


@pytest.mark.capability("determinism")
def test_determinism(trial: Trial) -> None:
    first = returned_bytes(trial.conforms())
    for number in range(1, REPEATS):
        same = returned_bytes(trial.repeat()) == first
        trial.require(same, Check.NONDETERMINISM, f"repeat {number} of the same call returned other bits")


@pytest.mark.capability("batch_invariance")
def test_batch_invariance(trial: Trial) -> None:
    whole = results(trial.conforms())
    for request, rows in enumerate(segments(trial.problem.query_start_loc)):
        alone = results(trial.conforms(regroup(trial.problem, [request]), step=f"request {request} alone"))
        if trial.declaration.batch_invariant:
            same = all(
                torch.equal(x.narrow(dim, rows.start, rows.stop - rows.start), y) for x, y, dim in pairs(whole, alone)
            )
            trial.require(same, Check.BATCH_DEPENDENCE, f"request {request} alone has other bits than in its batch")


def pairs(whole: list[torch.Tensor], alone: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Output and LSE of two runs, with the dimension that counts tokens."""
    return list(zip(whole, alone, (0, 1), strict=False))


@pytest.mark.capability("request_order")
def test_request_order(trial: Trial) -> None:
    backwards = list(reversed(range(len(trial.case.q))))
    trial.conforms(step="as given")
    trial.conforms(regroup(trial.problem, backwards), step="requests in reverse order")


@pytest.mark.capability("causal_prefix")
def test_causal_prefix(trial: Trial) -> None:
    everyone = range(len(trial.case.q))
    for length in (1, 17, max(trial.case.q) - 1, max(trial.case.q)):
        trial.conforms(regroup(trial.problem, everyone, length), step=f"the first {length} tokens of each request")


@pytest.mark.capability("split_invariance")
def test_split_invariance(trial: Trial) -> None:
    for workspace in (64, 128, 2048):
        other = build_problem(replace(trial.case, workspace=workspace), trial.subject.device)
        trial.conforms(other, step=f"workspace of {workspace} tokens")


@pytest.mark.capability("v_linearity")
def test_v_linearity(trial: Trial) -> None:
    output, *lse = results(trial.conforms())
    for factor in (-2.0, 0.25):
        scaled, *same_lse = results(trial.conforms(scale_values(trial.problem, factor), step=f"V × {factor:g}"))
        exact = torch.equal(scaled, output * factor)
        trial.require(exact, Check.NONLINEARITY, f"V × {factor:g} does not give exactly {factor:g} × the output")
        trial.require(all(map(torch.equal, lse, same_lse)), Check.NONLINEARITY, f"V × {factor:g} changes the LSE")
