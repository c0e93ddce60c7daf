"""Error budgets of golden results, computed once for all backends that declare the same roundings."""

from dataclasses import dataclass

import torch

from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.problems.kept import Kept
from mla_conformance.problems.operands import segments
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.error_budget import (
    Roundoffs,
    element_budget,
    expected_row_rms,
    lse_budget,
    rms_limit,
)

KEPT_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Memory that budgets and their golden results may keep, by type of device; the last one is kept in any case."""


@dataclass(frozen=True)
class Budget:
    """How far a faithful kernel may be from a golden result.

    Attributes:
        golden: the result, with error terms.
        visible: [N, T] bool, the rows that see a key.
        element: [T, N, V] largest error of the output.
        row_rms: [T, N] expected RMS error of the output over the columns.
        lse: [N, T] largest error of the LSE.
        samples: [B] int64, rows of each request.
        limits: [B] largest plausible RMS of a request's rows over its expectation.
    """

    golden: AttentionState
    visible: torch.Tensor
    element: torch.Tensor
    row_rms: torch.Tensor
    lse: torch.Tensor
    samples: torch.Tensor
    limits: torch.Tensor

    @property
    def memory(self) -> int:
        """Bytes of all tensors."""
        terms = self.golden.terms.by_name().values() if self.golden.terms else ()
        own = (value for value in vars(self).values() if isinstance(value, torch.Tensor))
        return sum(tensor.nbytes for tensor in (self.golden.output, self.golden.lse, *terms, *own))


_kept = Kept[Budget]()


def budget_of(golden: AttentionState, rows: JudgedRows, allowed: Roundoffs, row_deviations: float) -> Budget:
    """The budget of a golden result for a kernel that rounds as ``allowed`` says.

    Args:
        golden: the result.
        rows: which rows of the batch it holds.
        allowed: what the kernel rounds.
        row_deviations: by how many deviations the RMS of independent errors may exceed its expectation.
    """
    key = (id(golden), allowed, row_deviations)  # a kept budget holds its golden result: no other has its id
    budget = _kept.find(key)
    if budget is None:
        lengths = [part.stop - part.start for part in segments(rows.start_loc)]
        limits = [rms_limit(max(1, count), row_deviations) for count in lengths]
        budget = Budget(
            golden=golden,
            visible=golden.lse != -torch.inf,
            element=element_budget(golden, allowed),
            row_rms=expected_row_rms(golden, allowed),
            lse=lse_budget(golden, allowed),
            samples=torch.tensor(lengths, dtype=torch.long, device=golden.lse.device),
            limits=golden.lse.new_tensor(limits),
        )
        _kept.keep(key, budget, budget.memory, KEPT_BYTES[golden.lse.device.type])
    return budget


def forget_budgets() -> None:
    """Compute every budget anew from here on."""
    _kept.forget()
