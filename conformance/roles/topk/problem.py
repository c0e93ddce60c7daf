"""From a top-k's case to its call, and its judge: exact scores, and what is declared beyond that (SPEC 8.7)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mla_conformance.backends import declaration, roles, topk
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging import golden, record, steps
from mla_conformance.problems import calls, memory, operands
from mla_conformance.reference import indexer, selected
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.topk.case import TIED, TopKCase

_LOW_BITS, _ONE_BIN = 0x3FF, 0x3F900000


@dataclass(frozen=True, kw_only=True)
class TopKCall(calls.KernelCall):  # ``run_top_k_per_row``, or that of pools; q and k are the logits [T, C]
    metadata: topk.TopKMetadata
    case: TopKCase

    name = "top-k"
    interface: ClassVar = topk.MLATopKBackend
    called: ClassVar = {"row_starts": "row starts", "token_lengths": "token lengths"}

    @property
    def entry(self) -> str:
        return "run_pool_top_k_per_row" if self.case.pool > 1 else "run_top_k_per_row"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.topk + (self.case.pool - 1) * self.case.tail


class TopKBatch(operands.Draw[TopKCase]):
    def calls(self) -> tuple[TopKCall]:
        case = self.case
        requests = [request for request, rows in enumerate(case.q) for _ in range(rows)]
        # Start and length of each row's window, those of padding behind.
        first = operands.start_loc(case.spans) if case.packed else (0,) * len(case.q)
        # Of a pool a row sees all tokens or none.
        windows = [(first[request], seen // case.pool) for request, seen in zip(requests, case.tokens, strict=True)]
        windows += [(0, 0)] * case.pad
        made = memory.poison((len(windows), case.width), self.dtype, torch.device("cpu"), case.poison)
        for row, (start, length) in enumerate(windows):
            kind = KINDS[case.data_of(requests[row] if row < len(requests) else 0)]
            made[row, start : start + length] = kind(torch.randn(length, generator=self.generator)).to(self.dtype)
        logits = made.to(self.device).unsqueeze(1)
        logits = operands.lay_out("q", logits, logits, case)[:, 0]
        tokens = torch.tensor([*case.tokens, *[0] * case.pad], dtype=torch.int32, device=self.device)
        starts, lengths = torch.tensor(windows, dtype=torch.int32, device=self.device).mT.contiguous()
        own = starts.clone() if case.packed else None
        pools = {"pool": case.pool, "tail": case.tail} if case.pool > 1 else {}
        call = TopKCall(
            q=logits,
            k=logits,
            given={"logits": logits, "topk_tokens": case.topk, **pools},
            query_start_loc=operands.start_loc(case.q),
            key_start_loc=operands.start_loc(case.totals),
            metadata=topk.TopKMetadata(lengths.clone(), own, case.width, tokens if case.pool > 1 else None),
            case=case,
        )
        return (call,)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "integers": lambda x: (2 * x).round(),
    "ones": torch.ones_like,
    # all in one bin of a coarse histogram, whose ties only the last bits break
    "last_bits": lambda x: (_ONE_BIN | (x * 1e6).int() & _LOW_BITS).view(torch.float32),
    "relu": lambda x: x.sub(1.5).relu(),  # few winners, and all others exactly 0
    # zeros of both signs, a few numbers above and many below
    "zeros": lambda x: torch.where(x.abs() < 1.5, x * 0.0, x),
    "negative": lambda x: -(10.0 ** (x * 8).clamp(-30, 30)),  # all below 0, of all magnitudes
    "rising": lambda x: x.sort().values,
    "falling": lambda x: x.sort(descending=True).values,
    # every sixteenth a thousand times as large, of either sign
    "outliers": lambda x: torch.where(torch.arange(len(x)) % 16 == 5, x * 1000, x),
    # all but a few beyond what fp16 holds, on both sides, so that a key made of halves has them in one bin
    "beyond_half": lambda x: torch.where(torch.arange(len(x)) % 64 == 7, x, (x - 1) * 1e6 - 7e4),
    # subnormals, which count as 0, among the smallest normal numbers
    "subnormal": lambda x: torch.where(x.abs() < 1, x * 2.0**-128, x * 2.0**-120),
    # a third -inf, and a few +inf: logits as any others
    "infinite": lambda x: x.masked_fill(x < -0.4, -torch.inf).masked_fill(x > 2, torch.inf),
    # all but a few -inf, as behind a mask of candidates: what is masked and still within a row's length counts
    "masked": lambda x: x.masked_fill(torch.arange(len(x)) % 11 > 0, -torch.inf),
    # some are no numbers: which columns are selected is free, that they are columns of the row is not
    "nan": lambda x: x.masked_fill(torch.arange(len(x)) % 3 == 1, torch.nan),
}
"""Standard normal numbers of a row to logits [length] float32, by the name of the kind."""


@dataclass(frozen=True)
class GoldenWindows(golden.Golden):
    scores: indexer.WindowScores  # their logits
    starts: torch.Tensor  # [n] int64, the first column of each
    tokens: torch.Tensor  # [n] int64, tokens that each sees where columns are pools, else columns


def golden_windows(problem: calls.Problem) -> GoldenWindows:
    (call,), rows = problem.calls, golden.choose_rows(problem)
    assert isinstance(call, TopKCall)
    lengths = rows.pick(call.metadata.lengths)
    starts = torch.zeros_like(lengths) if call.metadata.row_starts is None else rows.pick(call.metadata.row_starts)
    tokens = lengths if call.metadata.token_lengths is None else rows.pick(call.metadata.token_lengths)
    return GoldenWindows(rows, indexer.window_scores(rows.pick(call.q), lengths, starts), starts.long(), tokens.long())


@dataclass(frozen=True)
class PoolTokens:
    numbers: torch.Tensor  # [n, K] int64 as they were named
    tokens: torch.Tensor  # [n] int64, tokens that each row sees
    pool: int  # tokens of a pool
    tail: bool  # whether those of the last pool are asked for, where it is not whole

    def positions(self, places: int) -> torch.Tensor:
        """[n, places] numbers of the whole pools that are named, the last first, -1 behind them."""
        named = self._told()[2] == self.pool
        numbered = torch.arange(named.shape[1], device=named.device).where(named, selected.NO_KEY)
        found = torch.nn.functional.pad(numbered, (0, places), value=selected.NO_KEY).sort(dim=1, descending=True)
        return found.values[:, :places]

    def wrong(self) -> Iterator[tuple[Callable[[int], str], torch.Tensor]]:
        """What may be wrong, as a clause about a row and the rows [n] bool of which it is true."""
        seen, last, counts = self._told()
        strange = (self.numbers != selected.NO_KEY) & ~seen
        yield lambda row: f"{int(self.numbers[row][strange[row]][0])} is no token that it sees", strange.any(dim=1)
        ordered = self.numbers.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != selected.NO_KEY)
        yield lambda row: f"token {int(ordered[row, 1:][twice[row]][0])} is named twice", twice.any(dim=1)
        wanted, of_last = (self.tokens % self.pool) * self.tail, "tokens of the last pool are named"
        yield lambda row: f"{int(last[row])} {of_last}, expected {int(wanted[row])}", last != wanted
        parts = (counts > 0) & (counts < self.pool)
        yield lambda row: f"not all tokens of pool {int(parts[row].int().argmax())} are named", parts.any(dim=1)

    def _told(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, K] which are tokens that the row sees, [n] how many of its last pool, [n, W] of each whole one."""
        seen = (self.numbers >= 0) & (self.numbers < self.tokens.unsqueeze(1))
        last = seen & (self.numbers >= (self.tokens // self.pool * self.pool).unsqueeze(1))
        width = int(self.tokens.max()) // self.pool if len(self.tokens) else 0
        at = (self.numbers // self.pool).where(seen & ~last, width)
        found = torch.zeros(len(at), width + 1, dtype=torch.int64, device=at.device)
        return seen, last.sum(dim=1), found.scatter_add_(1, at, torch.ones_like(at))[:, :width]


class TopKJudge(steps.SelectionSteps):
    expectation: GoldenWindows
    case: TopKCase

    def measured(self, observation: Observation) -> Iterator[steps.Measured]:
        for numbers in self._selected(observation):
            scores = self.expectation.scores
            yield steps.selected(self._positions(numbers), scores, scores.magnitude)

    def _expected_form(self, returned: Returned) -> steps.Form:
        return [("topk_indices", torch.Size(returned.call.result_shape), torch.int32)]

    def _numbers(self, observation: Observation) -> Iterator[record.Verdict | None]:
        golden = self.expectation.scores
        for returned, numbers in zip(observation.returned, self._selected(observation), strict=True):
            name, positions = returned.call.name, self._positions(numbers)
            if self.case.pool > 1:
                for reason, wrong in self._tokens(numbers).wrong():
                    yield self._misnamed(name, reason, wrong)
                yield from self._selection(f"{name} of pools", positions, positions, golden, golden.magnitude)
                continue
            yield from self._selection(name, numbers, positions, golden, golden.magnitude)
            yield from self._declared(name, positions)

    def _selected(self, observation: Observation) -> Iterator[torch.Tensor]:
        return (self.rows.pick(returned.value).long() for returned in observation.returned)

    def _positions(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n, K] positions in their rows' windows; -1 for -1, -2 for no column of the window; of pools whole ones."""
        if self.case.pool > 1:
            return self._tokens(numbers).positions(self.case.topk // self.case.pool)
        relative = numbers if self.declaration.selection.relative else numbers - self.expectation.starts.unsqueeze(1)
        return relative.where(relative >= 0, steps.NOTHING).where(numbers != selected.NO_KEY, selected.NO_KEY)

    def _tokens(self, numbers: torch.Tensor) -> PoolTokens:
        return PoolTokens(numbers, self.expectation.tokens, self.case.pool, self.case.tail)

    def _declared(self, name: str, positions: torch.Tensor) -> Iterator[record.Verdict | None]:
        """Where -1 stands, the order of what is named, and which of equal ones were taken."""
        golden, named, declared = self.expectation.scores, positions >= 0, self.declaration.selection
        scores, empty = golden.scores, not golden.scores.numel()
        if declared.padding_behind:
            wrong = (named[:, 1:] & ~named[:, :-1]).any(dim=1)
            yield self._misnamed(name, lambda row: "-1 stands before a column, expected it behind all of them", wrong)
        if declared.order is not declaration.SelectionOrder.ANY:
            values = positions
            if declared.order is not declaration.SelectionOrder.ASCENDING:
                at = positions.clamp(min=0, max=scores.shape[1] - 1)
                values = torch.zeros_like(positions) if empty else -scores.gather(1, at)
            # Where one of two is no column, nothing is compared.
            wrong = ((values[:, 1:] < values[:, :-1]) & named[:, 1:] & named[:, :-1]).any(dim=1) & ~golden.unordered
            order = declared.order.value
            yield self._misnamed(name, lambda row: f"columns are not in {order} order, which is declared", wrong)
        if declared.ties is declaration.Ties.FREE or set(TIED).intersection(self.case.regimes) or empty:
            return
        # Whether a column is left out for an equal one that the declaration puts behind it.
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        rows, columns = named.nonzero().unbind(1)
        chosen[rows, positions[rows, columns]] = True
        last = scores.masked_fill(~chosen, torch.inf).amin(dim=1, keepdim=True)
        tied, place = scores == last, torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        place = place if declared.ties is declaration.Ties.FIRST else -place
        taken = place.masked_fill(~(tied & chosen), -scores.shape[1]).amax(dim=1)
        left = place.masked_fill(~tied | chosen, scores.shape[1]).amin(dim=1)
        wrong, first = (left < taken) & ~golden.unordered, declared.ties.value
        yield self._misnamed(name, lambda row: f"of equal logits not the {first} are taken, as is declared", wrong)


class _TopK(RoleDefinition):
    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        if case.pool > 1 and not getattr(kernel, "supports_pools", False):
            return ["columns of several tokens not declared (supports_pools)"]
        return super().reasons(kernel, case, dtype, capability)


TOPK = _TopK(
    role=roles.Role.TOPK,
    batch=TopKBatch,
    config=topk.MLATopKSelectorConfig,
    constructed=(),
    golden=golden_windows,
    judge=TopKJudge,
)
