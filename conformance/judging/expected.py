"""What a right result of a problem is, whatever the problem asks for."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_conformance.judging.judged_rows import JudgedRows


@dataclass(frozen=True)
class Expected(ABC):
    """Golden results of the judged rows.

    Attributes:
        rows: which rows they are.
    """

    rows: JudgedRows

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that they consist of."""

    def intact(self) -> bool:
        """Whether what was derived from them is as it was computed."""
        return True
