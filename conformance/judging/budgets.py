"""Error budgets of golden results, computed once for all backends that declare the same roundings."""

from dataclasses import dataclass

import torch

from mla_conformance.problems.kept import Kept
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.error_budget import Roundoffs, element_budget, expected_row_rms, lse_budget

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
    """

    golden: AttentionState
    visible: torch.Tensor
    element: torch.Tensor
    row_rms: torch.Tensor
    lse: torch.Tensor

    @property
    def memory(self) -> int:
        """Bytes of all tensors."""
        terms = self.golden.terms.by_name().values() if self.golden.terms else ()
        tensors = (self.golden.output, self.golden.lse, *terms, self.visible, self.element, self.row_rms, self.lse)
        return sum(tensor.nbytes for tensor in tensors)


_kept = Kept[Budget]()


def budget_of(golden: AttentionState, allowed: Roundoffs) -> Budget:
    """The budget of a golden result for a kernel that rounds as ``allowed`` says."""
    key = (id(golden), allowed)  # a kept budget holds its golden result, so that no other has its id
    budget = _kept.find(key)
    if budget is None:
        rules = (rule(golden, allowed) for rule in (element_budget, expected_row_rms, lse_budget))
        budget = Budget(golden, golden.lse != -torch.inf, *rules)
        _kept.keep(key, budget, budget.memory, KEPT_BYTES[golden.lse.device.type])
    return budget


def forget_budgets() -> None:
    """Compute every budget anew from here on."""
    _kept.forget()
