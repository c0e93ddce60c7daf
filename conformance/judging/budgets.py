"""Error budgets of golden results, computed once for all backends that declare the same roundings."""

from dataclasses import dataclass

import torch

from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.problems.memory import checksum
from mla_conformance.problems.operands import segments
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.error_budget import (
    Roundoffs,
    element_budget,
    expected_row_rms,
    lse_budget,
    rms_limit,
)

_MOST_KEPT = 8


@dataclass(frozen=True)
class Budget:
    """How far a faithful kernel may be from a golden result.

    Attributes:
        visible: [N, T] bool, the rows that see a key.
        element: [T, N, V] largest error of the output.
        row_rms: [T, N] expected RMS error of the output over the columns.
        lse: [N, T] largest error of the LSE.
        samples: [B] int64, rows of each request.
        limits: [B] largest plausible RMS of a request's rows over its expectation.
    """

    visible: torch.Tensor
    element: torch.Tensor
    row_rms: torch.Tensor
    lse: torch.Tensor
    samples: torch.Tensor
    limits: torch.Tensor


class Budgets:
    """The budgets of an expectation's golden results."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Roundoffs, float], tuple[Budget, list[int]]] = {}

    def of(self, golden: AttentionState, rows: JudgedRows, allowed: Roundoffs, row_deviations: float) -> Budget:
        """The budget of a golden result for a kernel that rounds as ``allowed`` says.

        Args:
            golden: one of the expectation's results, which outlives its budgets: no other has its id meanwhile.
            rows: which rows of the batch it holds.
            allowed: what the kernel rounds.
            row_deviations: by how many deviations the RMS of independent errors may exceed its expectation.
        """
        key = (id(golden), allowed, row_deviations)
        if key not in self._found:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            budget = _budget(golden, rows, allowed, row_deviations)
            self._found[key] = (budget, checksum(vars(budget).values()))
        return self._found[key][0]

    def intact(self) -> bool:
        """Whether every byte of them is as it was computed."""
        return all(checksum(vars(budget).values()) == sums for budget, sums in self._found.values())


def _budget(golden: AttentionState, rows: JudgedRows, allowed: Roundoffs, row_deviations: float) -> Budget:
    lengths = [part.stop - part.start for part in segments(rows.start_loc)]
    limits = [rms_limit(max(1, count), row_deviations) for count in lengths]
    return Budget(
        visible=golden.lse != -torch.inf,
        element=element_budget(golden, allowed),
        row_rms=expected_row_rms(golden, allowed),
        lse=lse_budget(golden, allowed),
        samples=torch.tensor(lengths, dtype=torch.long, device=golden.lse.device),
        limits=golden.lse.new_tensor(limits),
    )
