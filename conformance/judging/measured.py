"""Numbers that a backend returned, beside the golden ones and the error that rounding may leave in them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mla_conformance.judging.golden import Budget
from mla_conformance.reference.quantization import e4m3_ordinal


@dataclass(frozen=True)
class Measured:
    """The output or the LSE of one part: of a call, or of all calls merged."""

    got: torch.Tensor  # what was returned, float64; e4m3 codes by their place in the order of codes
    golden: torch.Tensor  # what is expected, in the same form; -inf where the LSE of a row without keys is
    allowed: torch.Tensor  # error that rounding may leave in ``got``, which is as large as it is wrong

    @staticmethod
    def of_output(got: torch.Tensor, golden: torch.Tensor, budget: torch.Tensor) -> "Measured":
        """Of an output [T, N, V] in a float dtype: a row that came out larger was rounded more coarsely."""
        got = got.double()
        sizes = got.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1, keepdim=True), golden.norm(dim=-1, keepdim=True)
        growth = torch.where(sizes[1] > 0, sizes[0] / sizes[1], 1.0).clamp(min=1.0)
        return Measured(got, golden, budget * growth)

    @staticmethod
    def of_codes(got: torch.Tensor, low: torch.Tensor, golden: torch.Tensor, high: torch.Tensor) -> "Measured":
        """Of e4m3 codes [T, N, V] between the codes of both ends of what is allowed."""
        not_a_number = got.double().isnan()
        codes = got.view(torch.uint8).masked_fill(not_a_number, 0).view(got.dtype)
        places = e4m3_ordinal(codes).double().masked_fill(not_a_number, torch.nan)
        return Measured(places, golden, torch.maximum(high - golden, golden - low))

    @staticmethod
    def of_lse(got: torch.Tensor, golden: torch.Tensor, budget: torch.Tensor) -> "Measured":
        got = got.double()
        growth = got.nan_to_num(0.0, 0.0, 0.0).abs() / golden.nan_to_num(0.0, 0.0, 0.0).abs().clamp(min=1.0)
        return Measured(got, golden, budget.nan_to_num(0.0) * growth.clamp(min=1.0))


class Largest(NamedTuple):
    """The largest value of each tensor of a comparison; 0 of none, and of bools whether one is true."""

    infinite: float
    written: float
    unmasked: float
    beyond: float
    lse: float
    element: float
    row: float


@dataclass(frozen=True)
class Compared:
    """A result beside its golden one. What there is nothing to compare of is empty."""

    budget: Budget  # how far it may be away
    infinite: torch.Tensor  # [] bool, whether an output is not finite, in rows that are not judged as well
    written: torch.Tensor  # [T, N] bool, outputs that are not 0 where no key is visible
    unmasked: torch.Tensor  # [N, T] bool, LSEs that are no number, or -inf elsewhere than where no key is visible
    beyond: torch.Tensor  # [N, T] bool, LSEs whose error is larger than is allowed
    lse: torch.Tensor  # [N, T] errors of the LSE in units of what is allowed
    rms: torch.Tensor  # [T, N] RMS errors of rows
    element: torch.Tensor  # [T, N, V] errors of the output in units of what is allowed
    row: torch.Tensor  # [T, N] RMS errors in units of what is allowed

    @cached_property
    def largest(self) -> Largest:
        """What decides. A GPU that is shared takes longer to answer than to compute all of it."""
        tensors = [getattr(self, name) for name in Largest._fields]
        zero = self.rms.new_zeros((), dtype=torch.float64)
        return Largest(*torch.stack([x.max().double() if x.numel() else zero for x in tensors]).tolist())
