"""A result beside its golden one: everything that is wrong with it if it is too large, asked of the device at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mla_conformance.judging.golden import Budget


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
    """A result beside its golden one. What there is nothing to compare of is empty.

    Attributes:
        budget: how far it may be away.
        infinite: [] bool, whether an output is not finite, in rows that are not judged as well.
        written: [T, N] bool, outputs that are not 0 where no key is visible.
        unmasked: [N, T] bool, LSEs that are no number, or -inf elsewhere than where no key is visible.
        beyond: [N, T] bool, LSEs whose error is larger than is allowed.
        lse: [N, T] errors of the LSE in units of what is allowed.
        rms: [T, N] RMS errors of rows.
        element: [T, N, V] errors of the output in units of what is allowed.
        row: [T, N] RMS errors in units of what is allowed.
    """

    budget: Budget
    infinite: torch.Tensor
    written: torch.Tensor
    unmasked: torch.Tensor
    beyond: torch.Tensor
    lse: torch.Tensor
    rms: torch.Tensor
    element: torch.Tensor
    row: torch.Tensor

    @cached_property
    def largest(self) -> Largest:
        """What decides. A GPU that is shared takes longer to answer than to compute all of it."""
        return Largest(*largest_of([getattr(self, name) for name in Largest._fields]))


def largest_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The largest value of each tensor of a device, 0 of none."""
    zero = tensors[0].new_zeros((), dtype=torch.float64)
    return torch.stack([x.max().double() if x.numel() else zero for x in tensors]).tolist()
