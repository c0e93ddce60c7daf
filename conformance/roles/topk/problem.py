"""From a top-k's case to its call: logits of a kind, windows, and poison around them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from mla_conformance.backends.topk import MLATopKBackend, TopKMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import Draw, lay_out, start_loc
from mla_conformance.roles.topk.case import TopKCase

_LOW_BITS, _ONE_BIN = 0x3FF, 0x3F900000


@dataclass(frozen=True, kw_only=True)
class TopKCall(KernelCall):
    """``run_top_k_per_row``, or that of pools; q and k are the logits [T, C]."""

    metadata: TopKMetadata
    case: TopKCase

    name = "top-k"
    interface: ClassVar = MLATopKBackend
    called: ClassVar = {"row_starts": "row starts", "token_lengths": "token lengths"}

    @property
    def entry(self) -> str:
        return "run_pool_top_k_per_row" if self.case.pool > 1 else "run_top_k_per_row"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.places


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
        requests = [request for request, rows in enumerate(self.case.q) for _ in range(rows)]
        for row, (start, length) in enumerate(self.windows):
            normal = torch.randn(length, generator=self.generator)
            kind = KINDS[self.case.data_of(requests[row] if row < len(requests) else 0)]
            made[row, start : start + length] = kind(normal).to(self.dtype)
        return made

    def calls(self) -> tuple[TopKCall]:
        case, logits = self.case, self.logits.to(self.device).unsqueeze(1)
        logits = lay_out("q", logits, logits, case)[:, 0]
        tokens = torch.tensor([*case.tokens, *[0] * case.pad], dtype=torch.int32, device=self.device)
        starts, lengths = torch.tensor(self.windows, dtype=torch.int32, device=self.device).mT.contiguous()
        pools = {"pool": case.pool, "tail": case.tail} if case.pool > 1 else {}
        only = TopKCall(
            q=logits,
            k=logits,
            given={"logits": logits, "topk_tokens": case.topk, **pools},
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


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "integers": lambda x: (2 * x).round(),
    "ones": torch.ones_like,
    # all in one bin of a coarse histogram, whose ties only the last bits break
    "last_bits": lambda x: (_ONE_BIN | (x * 1e6).int() & _LOW_BITS).view(torch.float32),
    # few winners, and all others exactly 0
    "relu": lambda x: x.sub(1.5).relu(),
    # zeros of both signs, a few numbers above and many below
    "zeros": lambda x: torch.where(x.abs() < 1.5, x * 0.0, x),
    # all below 0, of all magnitudes
    "negative": lambda x: -(10.0 ** (x * 8).clamp(-30, 30)),
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
