"""What an indexer's selection names, exactly: tokens that its rows see, each once, as many as there are."""

from collections.abc import Callable, Iterator

import torch

from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.measured import Measured
from mla_conformance.reference.index_scores import IndexScores
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.indexer.call import IndexerCall

_NOTHING = -2
"""The position of what is no token of the row's request."""


def positions_of(call: IndexerCall, rows: JudgedRows, numbers: torch.Tensor) -> torch.Tensor:
    """[n, K] int64 positions that selected numbers [n, K] of judged rows stand for; -1 for -1, -2 for no such token."""
    if call.case.space == IndexSpace.POSITION:
        return numbers.where(numbers >= NO_KEY, _NOTHING)
    starts = torch.tensor(call.key_start_loc, device=numbers.device)
    request = rows.pick(call.metadata.req_id_per_token.long())
    first, end = starts[request].unsqueeze(1), starts[request + 1].unsqueeze(1)
    blocks, page = call.stored.shape[:2] if call.case.is_paged else (len(call.stored), 1)
    keys = numbers.new_full((blocks * page,), _NOTHING)
    keys[call.slots.to(numbers.device)] = torch.arange(len(call.slots), device=numbers.device)
    key = keys[numbers.clamp(0, len(keys) - 1)].where((numbers >= 0) & (numbers < len(keys)), _NOTHING)
    own = (key >= first) & (key < end)
    return (key - first).where(own, _NOTHING).where(numbers != NO_KEY, NO_KEY)


def wrong_tokens(
    numbers: torch.Tensor, positions: torch.Tensor, bounds: torch.Tensor
) -> Iterator[tuple[Callable[[int], str], torch.Tensor]]:
    """What may be wrong, as a clause about a row and the rows [n] bool of which it is true.

    Args:
        numbers: [n, K] as they were selected.
        positions: [n, K] what they stand for.
        bounds: [n] tokens that each row sees.
    """
    foreign = positions == _NOTHING
    yield lambda row: f"{_first(numbers, foreign, row)} is no token of the request", foreign.any(dim=1)
    late = positions >= bounds.unsqueeze(1)
    yield (
        lambda row: f"token {_first(positions, late, row)} is selected, expected those below {int(bounds[row])}",
        late.any(dim=1),
    )
    ordered = positions.sort(dim=1).values
    twice = torch.zeros_like(late)
    twice[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    yield lambda row: f"token {_first(ordered, twice, row)} is selected twice", twice.any(dim=1)
    got, want = (positions >= 0).sum(dim=1), bounds.clamp(max=positions.shape[1])
    yield (
        lambda row: f"{int(got[row])} tokens are selected, expected {int(want[row])} of {int(bounds[row])}",
        got != want,
    )


def selected(positions: torch.Tensor, golden: IndexScores, budget: torch.Tensor) -> Measured:
    """How often each row selected each token [n, W], then anything else; expected are the best by their golden scores.

    Args:
        positions: [n, K] what was selected.
        golden: of the rows.
        budget: [n, W] errors of the scores; what may change places with the last of the best may be selected or not.
    """
    width = golden.scores.shape[1]
    counted = positions.where((positions >= 0) & (positions < width), width)
    got = torch.zeros(len(positions), width + 1, dtype=torch.float64, device=positions.device)
    got.scatter_add_(1, counted, torch.ones_like(counted, dtype=torch.float64))
    best = golden.scores.topk(min(positions.shape[1], width), dim=1)
    wanted = torch.zeros_like(got).scatter_(1, best.indices, best.values.isfinite().double())
    wanted[:, width] = positions.shape[1] - wanted.sum(dim=1)
    if not best.values.numel():
        return Measured(got, wanted, torch.zeros_like(got))
    near = (golden.scores - best.values[:, -1:]).abs() <= budget + budget.gather(1, best.indices[:, -1:])
    return Measured(got, wanted, torch.nn.functional.pad(near.double(), (0, 1)))


def _first(values: torch.Tensor, wrong: torch.Tensor, row: int) -> int:
    return int(values[row][wrong[row]][0])
