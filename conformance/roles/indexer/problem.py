"""From an indexer's case to its call, and its judge: scores one by one, selected tokens by scores (SPEC 8)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mla_conformance.backends import indexer, roles, sparse
from mla_conformance.cases.case import Call
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging import golden, record, steps, tolerance
from mla_conformance.problems import cached_batch, calls, operands
from mla_conformance.reference.indexer import IndexScores, index_scores
from mla_conformance.reference.quantization import E4M3_MAX, quantize_e4m3
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.indexer.case import IndexerCase

_MEAN_WEIGHT = 0.5  # weights have either sign, most of them that of a key that all heads agree on


@dataclass(frozen=True, kw_only=True)
class IndexerCall(calls.KernelCall):
    """``run_index_logits`` or ``run_index_topk``; q is what is handed over, k what the keys mean, in float64."""

    slots: torch.Tensor  # [S] int64 on the CPU, where the key of each token stands
    metadata: sparse.MLASparseMetadata
    case: IndexerCase

    meant: ClassVar = ("q", "k", "weights")
    interface: ClassVar = indexer.MLAIndexerBackend
    means: ClassVar = {"q": "T", "k": "S", "slots": "S"}
    called: ClassVar = {"q": "query", "k": "stored"}

    @property
    def name(self) -> str:
        return "index top-k" if self.selects else "index logits"

    @property
    def selects(self) -> bool:
        return self.case.call == Call.INDEX_TOPK

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.topk if self.selects else self.metadata.max_seq_len


class IndexerBatch(cached_batch.CachedBatch[IndexerCase]):
    def calls(self) -> tuple[IndexerCall]:
        case, codes = self.case, self.case.holds_codes
        entries = self.entries  # drawn before the queries, and these before the weights
        # [rows, H, D] in the model's dtype, on the CPU, without rows of padding.
        normal = torch.randn(sum(case.q), case.heads, case.head_dim, generator=self.generator)
        drawn = self.queries_of(normal, self.keys_by_request).to(self.dtype)
        # [rows, H], the next power of two of the least scale that leaves no head out of the codes' range.
        scales = torch.ones(drawn.shape[:2])
        if codes:
            scales = torch.exp2((drawn.double().abs().amax(dim=-1) / E4M3_MAX).clamp(min=1e-10).log2().ceil())
        queries = self.padded(quantize_e4m3(drawn.double() / scales.unsqueeze(-1), 1.0) if codes else drawn)
        # [T, H] float32: those of the model times its scales, and times those of queries in codes.
        weights = _MEAN_WEIGHT + torch.randn(drawn.shape[:2], generator=self.generator)
        weights = self.padded((weights * case.heads**-0.5 * case.softmax_scale * scales).float())
        told, k_scale = self.metadata(self.totals), None
        if case.is_paged:
            pages = cached_batch.write_pages(self, entries, self.totals, case.cache, case.page)
            k = pages.cache
        else:  # keys [S, D], and the scales [S] of codes
            pages = cached_batch.gather_entries(case, entries, self.totals, self.device)
            k = pages.cache[:, 0]
            if codes:
                k, scale = (part.contiguous() for part in k.tensor_split([case.head_dim], dim=1))
                k, k_scale = k.view(torch.float8_e4m3fn), scale.view(torch.float32)[:, 0]
        given = {"q": operands.lay_out("q", queries, queries, case), "weights": weights, "k": k}
        call = IndexerCall(
            q=queries,
            k=self.keys,
            query_start_loc=self.query_start_loc,
            key_start_loc=operands.start_loc(self.totals),
            given=given | ({"topk_tokens": case.topk} if case.call == Call.INDEX_TOPK else {}),
            named={"k_scale": k_scale},
            slots=pages.slots,
            metadata=cached_batch.list_metadata(told, pages.block_table, case.space, paged=case.is_paged),
            case=case,
        )
        return (call,)


@dataclass(frozen=True)
class GoldenScores(golden.Golden):
    scores: IndexScores


def golden_scores(problem: calls.Problem) -> GoldenScores:
    (call,), rows = problem.calls, golden.choose_rows(problem)
    starts = {"query_start_loc": call.query_start_loc, "key_start_loc": call.key_start_loc}
    return GoldenScores(rows, index_scores(call.q, call.weights, call.k[:, 0], **starts, rows=rows.numbers))


def positions_of(call: calls.KernelCall, rows: golden.JudgedRows, numbers: torch.Tensor) -> torch.Tensor:
    """[n, K] int64 positions that selected numbers [n, K] of judged rows stand for; -1 for -1, -2 for no such token."""
    if call.case.space == roles.IndexSpace.POSITION:
        return numbers.where(numbers >= NO_KEY, steps.NOTHING)
    starts = torch.tensor(call.key_start_loc, device=numbers.device)
    request = rows.pick(call.metadata.req_id_per_token.long())
    first, end = starts[request].unsqueeze(1), starts[request + 1].unsqueeze(1)
    stored = call.given["k"]
    blocks, page = stored.shape[:2] if call.case.is_paged else (len(stored), 1)
    keys = numbers.new_full((blocks * page,), steps.NOTHING)
    keys[call.slots.to(numbers.device)] = torch.arange(len(call.slots), device=numbers.device)
    key = keys[numbers.clamp(0, len(keys) - 1)].where((numbers >= 0) & (numbers < len(keys)), steps.NOTHING)
    own = (key >= first) & (key < end)
    return (key - first).where(own, steps.NOTHING).where(numbers != NO_KEY, NO_KEY)


class IndexJudge(steps.SelectionSteps):
    expectation: GoldenScores

    def measured(self, observation: Observation) -> Iterator[steps.Measured]:
        (returned,), (golden, budget) = observation.returned, self._golden()
        if returned.call.selects:
            yield steps.selected(
                positions_of(returned.call, self.rows, self.rows.pick(returned.value).long()), golden, budget
            )
        else:
            got = self.rows.pick(returned.value)[:, : golden.visible.shape[1]].double()
            yield steps.Measured(*(x.where(golden.visible, 0.0) for x in (got, golden.scores, budget)))

    def _expected_form(self, returned: Returned) -> steps.Form:
        name, dtype = ("topk_indices", torch.int32) if returned.call.selects else ("logits", torch.float32)
        return [(name, torch.Size(returned.call.result_shape), dtype)]

    def _numbers(self, observation: Observation) -> Iterator[record.Verdict | None]:
        (returned,), (golden, budget) = observation.returned, self._golden()
        call, got = returned.call, self.rows.pick(returned.value)
        if call.selects:
            positions = positions_of(call, self.rows, got.long())
            yield from self._selection(call.name, got.long(), positions, golden, budget)
            return
        got = got[:, : golden.scores.shape[1]].double()
        error = (got - golden.scores).abs().masked_fill(~golden.visible, 0.0)
        share = steps.share_of(error, budget).masked_fill(error.isnan(), torch.inf)
        self.used = replace(self.used, element=max(self.used.element, steps.worst_of(share)))
        if self.used.element > 1:
            row, token = divmod(int(share.argmax()), share.shape[1])
            yield self._wrong(
                f"{call.name}: score is {got[row, token]:.5g} of token {token} at {self._at(row)}, expected "
                f"{golden.scores[row, token]:.5g}: {share[row, token]:.3g} × its error budget",
                (share > 1).any(dim=1),
            )

    def _golden(self) -> tuple[IndexScores, torch.Tensor]:
        declared, codes = self.declaration.rounding_of(self.problem.dtype), self.problem.dtype == torch.float8_e4m3fn
        allowed = tolerance.roundoffs(self.problem.output_dtype, declared, self.numbers, dequantised=codes)
        scores = self.expectation.scores
        return scores, scores.budget(allowed) * self.numbers.element_limit


INDEXER = RoleDefinition(
    role=roles.Role.INDEXER,
    batch=IndexerBatch,
    config=indexer.MLAIndexerSelectorConfig,
    constructed=("num_heads", "head_dim", "kv_cache_dtype"),
    facts=lambda case, dtype: {
        "call": "logits" if case.call == Call.INDEX_LOGITS else "topk",
        "block_size": case.page if case.is_paged else 1,
        "head_dim": case.head_dim,
    },
    golden=golden_scores,
    judge=IndexJudge,
)
