"""From a top-k's case to its call: logits of a kind, windows, and poison around them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from mla_conformance.backends.topk import MLATopKBackend, TopKMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import Draw, lay_out, start_loc
from mla_conformance.roles.topk.case import TopKCase

_LOW_BITS, _ONE_BIN = 0x3FF, 0x3F900000


@dataclass(frozen=True, kw_only=True)
class TopKCall(KernelCall):
    """``run_top_k_per_row``; q and k are the logits [T, C]."""

    metadata: TopKMetadata
    case: TopKCase

    reads: ClassVar = ("q",)
    per_row: ClassVar = ("q", "k")
    called: ClassVar = {"q": "logits", "row_starts": "row starts", "token_lengths": "token lengths"}

    @property
    def name(self) -> str:
        return "top-k"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.places

    def invoke(self, backend: MLATopKBackend, out: Guarded | None) -> Any:
        case = self.case
        if case.pool > 1:
            return backend.run_pool_top_k_per_row(self.q, case.topk, case.pool, case.tail)
        return backend.run_top_k_per_row(self.q, case.topk)


class TopKBatch(Draw[TopKCase]):
    """The batch of a top-k's case."""

    @cached_property
    def windows(self) -> list[tuple[int, int]]:
        """Start and length of each row, those of padding behind."""
        case = self.case
        starts = start_loc(case.spans) if case.packed else (0,) * len(case.q)
        first = [start for start, q in zip(starts, case.q, strict=False) for _ in range(q)]
        return [*zip(first, case.lengths, strict=True), *[(0, 0)] * case.pad]

    @property
    def logits(self) -> torch.Tensor:
        """[T, C] on the CPU: those of a row's window are of the case's kind, all others are poison."""
        made = poison((len(self.windows), self.case.width), self.dtype, torch.device("cpu"), self.case.poison)
        for row, (start, length) in enumerate(self.windows):
            normal = torch.randn(length, generator=self.generator)
            made[row, start : start + length] = KINDS[self.case.data](normal).to(self.dtype)
        return made

    def calls(self) -> tuple[TopKCall]:
        case, logits = self.case, self.logits.to(self.device).unsqueeze(1)
        logits = lay_out("q", logits, logits, case)[:, 0]
        tokens = torch.tensor([*case.tokens, *[0] * case.pad], dtype=torch.int32, device=self.device)
        starts, lengths = torch.tensor(self.windows, dtype=torch.int32, device=self.device).mT.contiguous()
        only = TopKCall(
            q=logits,
            k=logits,
            query_start_loc=start_loc(case.q),
            key_start_loc=start_loc([q + kv for q, kv in zip(case.q, case.kv, strict=True)]),
            metadata=TopKMetadata(
                lengths.clone(),
                starts.clone() if case.packed else None,
                case.width,
                tokens if case.pool > 1 else None,
            ),
            case=case,
        )
        return (only,)


def _last_bits(x: torch.Tensor) -> torch.Tensor:
    """All in one bin of a coarse histogram, whose ties only the last bits break."""
    return (_ONE_BIN | (x * 1e6).int() & _LOW_BITS).view(torch.float32)


def _relu(x: torch.Tensor) -> torch.Tensor:
    """Few winners, and all others exactly 0."""
    return x.sub(1.5).relu()


def _zeros(x: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs, a few numbers above and many below."""
    return torch.where(x.abs() < 1.5, x * 0.0, x)


def _negative(x: torch.Tensor) -> torch.Tensor:
    """All below 0, of all magnitudes."""
    return -(10.0 ** (x * 8).clamp(-30, 30))


def _outliers(x: torch.Tensor) -> torch.Tensor:
    """Every sixteenth a thousand times as large, of either sign."""
    return torch.where(torch.arange(len(x)) % 16 == 5, x * 1000, x)


def _beyond_half(x: torch.Tensor) -> torch.Tensor:
    """All but a few beyond what fp16 holds, on both sides, so that a key made of halves has them in one bin."""
    return torch.where(torch.arange(len(x)) % 64 == 7, x, (x - 1) * 1e6 - 7e4)


def _subnormal(x: torch.Tensor) -> torch.Tensor:
    """Subnormals, which count as 0, among the smallest normal numbers."""
    return torch.where(x.abs() < 1, x * 2.0**-128, x * 2.0**-120)


def _infinite(x: torch.Tensor) -> torch.Tensor:
    """A third -inf, and a few +inf: logits as any others."""
    return x.masked_fill(x < -0.4, -torch.inf).masked_fill(x > 2, torch.inf)


def _masked(x: torch.Tensor) -> torch.Tensor:
    """All but a few -inf, as behind a mask of candidates: what is masked and still within a row's length counts."""
    return x.masked_fill(torch.arange(len(x)) % 11 > 0, -torch.inf)


def _nan(x: torch.Tensor) -> torch.Tensor:
    """Some are no numbers: which columns are selected is free, that they are columns of the row is not."""
    return x.masked_fill(torch.arange(len(x)) % 3 == 1, torch.nan)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "integers": lambda x: (2 * x).round(),
    "ones": torch.ones_like,
    "last_bits": _last_bits,
    "relu": _relu,
    "zeros": _zeros,
    "negative": _negative,
    "rising": lambda x: x.sort().values,
    "falling": lambda x: x.sort(descending=True).values,
    "outliers": _outliers,
    "beyond_half": _beyond_half,
    "subnormal": _subnormal,
    "infinite": _infinite,
    "masked": _masked,
    "nan": _nan,
}
"""Standard normal numbers of a row to logits [length] float32, by the name of the kind."""
