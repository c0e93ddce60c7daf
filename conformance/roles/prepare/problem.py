"""From a preparation's case to its call, and its judge: scales of their class, then codes (SPEC 8.8)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mla_conformance.backends import declaration, prepare, roles
from mla_conformance.driving.driver import Observation, Returned, parts_of
from mla_conformance.judging import diagnosis, golden, record, steps, tolerance
from mla_conformance.problems import calls, operands
from mla_conformance.reference import indexer as reference
from mla_conformance.reference.indexer import Prepared
from mla_conformance.reference.projections import Rotation
from mla_conformance.reference.quantization import e4m3_ordinal, quantize_e4m3
from mla_conformance.roles.definition import RoleDefinition, filled
from mla_conformance.roles.prepare.case import BLOCK, PrepareCase


@dataclass(frozen=True, kw_only=True)
class PrepareCall(calls.KernelCall):  # ``run_prepare_index``; q [T, H, D] and k [T, D] are what is handed over
    metadata: prepare.PrepareMetadata
    case: PrepareCase

    name = "index preparation"
    token_dims: ClassVar = (0, 0, 0, 0)
    interface: ClassVar = prepare.MLAPrepareBackend
    called: ClassVar = {"k_norm_weight": "norm_weight", "k_norm_bias": "norm_bias"}


class PrepareBatch(operands.Draw[PrepareCase]):
    def calls(self) -> tuple[PrepareCall]:
        case, starts = self.case, operands.start_loc(self.case.q)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(starts[-1], *shape, generator=self.generator)

        q = self.padded(self.by_request(KINDS, normal(case.heads, case.head_dim), starts).to(self.dtype))
        q = operands.lay_out("q", q, q, case)
        # Keys [T, D], and the weights [T, H] of the model's dtype beside them, or in float32 by themselves.
        k = self.padded(self.by_request(KINDS, normal(case.head_dim), starts).to(self.dtype))
        weights = self.padded(normal(case.heads).to(self.dtype if case.fused else torch.float32))
        if case.fused:
            k, weights = torch.cat((k, weights), dim=1).tensor_split([case.head_dim], dim=1)
        norm_weight = (1 + 0.5 * normal(case.head_dim)[0]).to(self.device)
        norm_bias = normal(case.head_dim)[0].to(self.device)
        # [T] int64, those of rows of padding 0; of every one that a token has cosines and sines [P, R] float32.
        own = [kv + row for new, kv in zip(case.q, case.kv, strict=True) for row in range(new)]
        positions = torch.tensor(own + [0] * case.pad, dtype=torch.int64)
        rotation = Rotation.plain(case.rope_dim, interleaved=case.pairs == "neighbours")
        table = rotation.table(torch.arange(int(positions.max()) + 1)).float()
        call = PrepareCall(
            q=q,
            k=k,
            given={"q": q, "k": k, "weights": weights, "k_norm_weight": norm_weight, "k_norm_bias": norm_bias},
            metadata=prepare.PrepareMetadata(positions.to(self.device), table.to(self.device)),
            query_start_loc=starts,
            key_start_loc=starts,
            case=case,
        )
        return (call,)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    # one column in sixteen a hundred times as large, which the transform spreads over all
    "outliers": lambda x: torch.where(torch.arange(x.shape[-1]) % 16 == 3, x * 100, x),
    "integers": lambda x: (2 * x).round(),
    "shifted": lambda x: x + 3,  # a mean far from 0, which a LayerNorm takes away and a norm without it does not
    "tiny_values": lambda x: x * 1e-3,
    # every other token is 0 throughout: a block without magnitude, a key without variance
    "zeros": lambda x: x * (torch.arange(len(x)) % 2 == 0).reshape(-1, *[1] * (x.dim() - 1)),
}
"""Standard normal numbers to queries [T, H, D] and keys [T, D] float32, by the name of the kind."""


@dataclass(frozen=True)
class GoldenPrepared(golden.Golden):
    q: Prepared  # [n, H, D]
    k: Prepared  # [n, 1, D]
    # [n, H] float64, what the scales of queries are multiplied by in folded weights; 1 where they are not
    factors: torch.Tensor


def golden_prepared(problem: calls.Problem) -> GoldenPrepared:
    (call,), rows = problem.calls, golden.choose_rows(problem)
    assert isinstance(call, PrepareCall)
    case, (q, k, weights) = call.case, map(rows.pick, call.query_operands())
    turns = call.metadata.cos_sin_cache[rows.pick(call.metadata.positions)]
    key = reference.layer_norm(Prepared.of(k.unsqueeze(1)), call.k_norm_weight, call.k_norm_bias, case.eps / 1e6)
    factors = weights.double() * (case.softmax_scale * case.heads**-0.5) if case.fold else weights.double() ** 0
    return GoldenPrepared(rows, _turned(Prepared.of(q), turns, case), _turned(key, turns, case), factors)


def _turned(x: Prepared, turns: torch.Tensor, case: PrepareCase) -> Prepared:
    first = case.head_dim - case.rope_dim if case.rope_last else 0
    turned = reference.rotated(x, turns, first, case.pairs == "neighbours")
    return reference.hadamard(turned) if case.hadamard else turned


@dataclass(frozen=True)
class _Part:
    name: str  # how messages call it
    codes: torch.Tensor  # [n, H, D] e4m3
    scales: torch.Tensor  # [n, H, C] float64
    values: torch.Tensor  # [n, H, D] float64, the golden ones
    error: torch.Tensor  # [n, H, D] the largest error of a faithful kernel

    def blocks(self, x: torch.Tensor) -> torch.Tensor:  # [n, H, C, columns] of [n, H, D]
        return x.unflatten(-1, (self.scales.shape[-1], -1))

    def allowed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places [n, H, D] in the order of codes: of the least that is allowed, the golden and the greatest value."""
        bounds = (self.values - self.error, self.values, self.values + self.error)
        scaled = (self.blocks(values) / self.scales.unsqueeze(-1) for values in bounds)
        low, golden, high = (e4m3_ordinal(quantize_e4m3(x, 1.0)).double().flatten(-2) for x in scaled)
        return low, golden, high


class PrepareJudge(steps.Steps):
    expectation: GoldenPrepared
    case: PrepareCase

    def measured(self, observation: Observation) -> Iterator[steps.Measured]:
        """Scales, then codes under them as far as they are positive; of an observation whose form is right."""
        for part in self._parts(observation):
            low, high = self._bounds(part)
            yield steps.Measured(part.scales, (low + high) / 2, (high - low) / 2)
            sound = (part.scales > 0) & part.scales.isfinite()
            yield steps.Measured.of_codes(part.codes, *replace(part, scales=part.scales.where(sound, 1.0)).allowed())

    def _expected_form(self, returned: Returned) -> steps.Form:
        tokens, heads, width = returned.call.q.shape
        blocks, fold = -(-width // BLOCK), self.case.fold
        return [
            ("codes of q", torch.Size((tokens, heads, width)), torch.float8_e4m3fn),
            ("codes of k", torch.Size((tokens, width)), torch.float8_e4m3fn),
            ("scales of k", torch.Size((tokens, blocks)), torch.float32),
            ("weights", torch.Size((tokens, heads)), torch.float32)
            if fold
            else ("scales of q", torch.Size((tokens, heads, blocks)), torch.float32),
        ]

    def _numbers(self, observation: Observation) -> Iterator[record.Verdict | None]:
        for part in self._parts(observation):
            yield self._scales(part)
            yield self._codes(part)

    def _parts(self, observation: Observation) -> Iterator[_Part]:
        golden, case, dtype = self.expectation, self.case, self.problem.dtype
        coarse = self.declaration.intermediates is declaration.Precision.MODEL and dtype != torch.float32
        between = tolerance.unit_roundoff(dtype) if coarse else 0.0
        for returned in observation.returned:
            q, k, k_scale, last = map(self.rows.pick, parts_of(returned.value))
            given, factors = last.double().reshape(*q.shape[:2], -1), golden.factors.unsqueeze(-1)
            scales, untold = given / factors, (given == 0) & (factors == 0)
            if case.fold and case.scales == "pow2":
                scales = reference.nearest_power(scales)
            for name, codes, held, right in (
                ("keys", k.unsqueeze(1), k_scale.double().unsqueeze(1), golden.k),
                ("queries", q, scales, golden.q),
            ):
                error = right.error(self.numbers.float32_accumulation, between)
                part = _Part(name, codes, held, right.values, error)
                if name == "queries" and bool(untold.any()):  # a weight of 0 is 0 under any scale
                    part = replace(part, scales=held.where(~untold, self._bounds(part)[0]))
                yield part

    def _bounds(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        largest, error = (part.blocks(x).amax(dim=-1) for x in (part.values.abs(), part.error))
        return reference.scale_bounds(largest, error, self.case.scales == "pow2")

    def _scales(self, part: _Part) -> record.Verdict | None:
        low, high = self._bounds(part)
        wrong = ~((part.scales > 0) & (part.scales >= low) & (part.scales <= high))
        if self.case.scales == "pow2":
            wrong |= torch.frexp(part.scales).mantissa != 0.5
        if not bool(wrong.any()):
            return None
        index = tuple(wrong.nonzero()[0].tolist())
        folded = ", as the weights have it," if part.name == "queries" and self.case.fold else ""
        between = f"{low[index]:.6g}" if low[index] == high[index] else f"{low[index]:.6g} to {high[index]:.6g}"
        what = f"scale of {part.name}{folded} is {part.scales[index]:.6g}"
        return self._wrong(f"{what}, expected {between}", wrong.any(dim=-1), index)

    def _codes(self, part: _Part) -> record.Verdict | None:
        not_a_number = part.codes.double().isnan()
        if bool(not_a_number.any()):
            index = tuple(not_a_number.nonzero()[0].tolist())
            return self._wrong(f"code of {part.name} is NaN", not_a_number.any(dim=-1), index)
        low, _, high = part.allowed()
        code = e4m3_ordinal(part.codes).double()
        outside = torch.maximum(low - code, code - high).clamp(min=0)
        if not bool(outside.any()):
            return None
        index = tuple(torch.unravel_index(outside.argmax(), outside.shape))
        scale = part.scales.repeat_interleave(outside.shape[-1] // part.scales.shape[-1], dim=-1)[index]
        got, want = float(part.codes[index].double() * scale), float(part.values[index])
        detail = f"code of {part.name} means {got:.5g}, expected {want:.5g}: "
        detail += f"{int(outside[index])} codes outside the allowed interval"
        return self._wrong(detail, (outside > 0).any(dim=-1), tuple(map(int, index)))

    def _wrong(self, message: str, wrong: torch.Tensor, index: tuple[int, ...]) -> record.Verdict:
        place = diagnosis.Position.of(self.rows, list(index))
        text = f"index preparation: {message}, at {place}, {diagnosis.extent(self.rows, wrong)}"
        return record.failed(record.Check.PREPARED, text, place.to_json())


def preparation(case: Any, scales: str, eps: float, **facts: Any) -> Any:
    facts |= {"rope_first": not case.rope_last, "is_neox_style": case.pairs == "halves"}
    return filled(prepare.IndexPreparation, case, {"scale_format": scales, "eps": eps, **facts})


PREPARE = RoleDefinition(
    role=roles.Role.PREPARE,
    batch=PrepareBatch,
    config=prepare.MLAPrepareSelectorConfig,
    constructed=("num_heads", "scale", "preparation"),
    facts=lambda case, dtype: {"preparation": preparation(case, case.scales, case.eps / 1e6, fold_scales=case.fold)},
    golden=golden_prepared,
    judge=PrepareJudge,
)
