"""The problem: a case made concrete on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
        dtype: of the operands, or of the model behind a cache.
        output_dtype: of unquantised results, and of the model behind operands in e4m3.
        query_start_loc: of each call.
        output_scale: of each call that asks for attention; None where outputs are not quantised.
    """

    case: Case
    key: str
    device: torch.device
    calls: tuple[KernelCall, ...]
    whole: AttentionOperands | None = None

    dtype: torch.dtype = field(init=False)
    output_dtype: torch.dtype = field(init=False)
    query_start_loc: tuple[int, ...] = field(init=False)
    output_scale: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        first = self.calls[0]
        vars(self).update(
            dtype=first.q.dtype,
            output_dtype=output_dtype(first.q.dtype),
            query_start_loc=first.query_start_loc,
            output_scale=first.output_scale if isinstance(first, AttentionCall) else None,
        )

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        return tuple(map(attention_call, self.calls))

    @property
    def caller_owned(self) -> dict[str, torch.Tensor]:
        """Every tensor that a backend may read and must not write, by name."""
        return {name: tensor for call in self.calls for name, tensor in call.owned().items()}

    def handed(self) -> "Problem":
        return replace(self, calls=tuple(call.handed() for call in self.calls), whole=None)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The operands and what they mean."""
        yield from self.caller_owned.values()
        for call in self.calls:
            yield from (getattr(call, name) for name in call.meant)
        if self.whole is not None:
            yield from (self.whole.q, self.whole.k, self.whole.v)
