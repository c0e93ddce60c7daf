"""A layer under test on several ranks, which share the tokens of each sequence and have heads of their own."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mla_conformance.backends.layer.context_parallel import Lockstep
from mla_conformance.cases.layer import LayerCase
from mla_conformance.driving.layer import Layer

if TYPE_CHECKING:
    from mla_conformance.problems.layer_call import LayerCall


class LayerOnRanks:
    """The ranks in this process, one after another up to each exchange."""

    def __init__(self, backend: Any, case: LayerCase, dtype: torch.dtype, device: torch.device) -> None:
        self._lockstep = Lockstep(case.ranks)
        self._layers = tuple(Layer(backend, case, dtype, device, group) for group in self._lockstep.groups)

    def prepare(self, parts: Sequence["LayerCall"]) -> None:
        """Weights and metadata of every rank."""
        for layer, part in zip(self._layers, parts, strict=True):
            part.prepare(layer)

    def forward(self, parts: Sequence["LayerCall"]) -> list[Any]:
        """The result of every rank."""
        return self._lockstep.run(
            [partial(part.invoke, layer, None) for layer, part in zip(self._layers, parts, strict=True)]
        )

    def kernel_evidence(self) -> dict[str, str]:
        """What the kernels of the first rank say of themselves."""
        return self._layers[0].kernel_evidence()
