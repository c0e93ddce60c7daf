"""The problem: a case made concrete on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mla_conformance.backends.kernel import output_dtype
from mla_conformance.cases.case import Case
from mla_conformance.problems.calls import AttentionCall, AttentionOperands, KernelCall, attention_call


@dataclass(frozen=True)
class Problem:
    """A case made concrete on one device.

    Attributes:
        case: what it was made from.
        key: the case's id, the salt, and how the problem was changed since; equal keys mean equal values.
        device: where the tensors are.
        calls: the calls to make, in order; all of the same queries.
        whole: attention to the keys of all calls at once, where it was known before they were divided.
    """

    case: Case
    key: str
    device: torch.device
    calls: tuple[KernelCall, ...]
    whole: AttentionOperands | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the operands, or of the model behind a cache."""
        return self.calls[0].q.dtype

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of unquantised results, and of the model behind operands in e4m3."""
        return output_dtype(self.dtype)

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return self.calls[0].query_start_loc

    @property
    def output_scale(self) -> torch.Tensor | None:
        return self.attention[0].output_scale

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        return tuple(map(attention_call, self.calls))

    @property
    def caller_owned(self) -> dict[str, torch.Tensor]:
        """Every tensor that a backend may read and must not write, by name."""
        return {name: tensor for call in self.calls for name, tensor in call.owned().items()}

    def handed(self) -> "Problem":
        return replace(self, calls=tuple(call.handed() for call in self.calls), whole=None)

    @property
    def memory(self) -> int:
        """Bytes behind the operands and what they mean."""
        storages = (tensor.untyped_storage() for tensor in self.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.caller_owned.values()
        for call in self.calls:
            yield from call.meant
        if self.whole is not None:
            yield from (self.whole.q, self.whole.k, self.whole.v)
