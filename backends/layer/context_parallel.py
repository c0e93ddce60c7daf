"""The ranks that share the tokens of each sequence, and what passes between them (vLLM's ``get_dcp_group``)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed

from mla_conformance.reference.attention import merge


class ContextParallelGroup(ABC):
    """Ranks of decode context parallelism, as one of them sees them; all make the same exchanges in the same order.

    Attributes:
        world_size: W, how many they are.
        rank: which one this is.
    """

    world_size: int
    rank: int

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...]: what each rank gave, all of one shape and dtype."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...] from [W, ...]: what each rank had for this one in its row ``rank``."""


class OnlyRank(ContextParallelGroup):
    """A rank that shares nothing."""

    world_size, rank = 1, 0

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[1, ...]."""
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x


@dataclass(frozen=True)
class DistributedGroup(ContextParallelGroup):
    """Ranks in processes of their own.

    Attributes:
        process_group: of ``torch.distributed``; None means all processes.
    """

    process_group: Any = None
    world_size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", torch.distributed.get_world_size(self.process_group))
        object.__setattr__(self, "rank", torch.distributed.get_rank(self.process_group))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...], by the group's all-gather."""
        gathered = x.new_empty(self.world_size, *x.shape)
        torch.distributed.all_gather(list(gathered), x.contiguous(), group=self.process_group)
        return gathered

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...], by the group's all-to-all."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, x.contiguous(), group=self.process_group)
        return received


_GROUP: ContextVar[ContextParallelGroup] = ContextVar("dcp_group", default=OnlyRank())  # noqa: B039 (it has no state)


def get_dcp_group() -> ContextParallelGroup:
    """The group that a layer which is constructed now belongs to; that of an only rank unless one was named."""
    return _GROUP.get()


@contextmanager
def dcp_group(group: ContextParallelGroup) -> Iterator[None]:
    """Layers that are constructed inside belong to ``group``."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def gather_heads(group: ContextParallelGroup, query: torch.Tensor) -> torch.Tensor:
    """[T, W·N, D]: the heads of all ranks, from this rank's [T, N, D]."""
    return group.all_gather(query).transpose(0, 1).flatten(1, 2)


def merge_over_ranks(group: ContextParallelGroup, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's heads to the keys of all ranks.

    Each rank receives what the others computed for its heads. vLLM knows this way too (``dcp_a2a_lse_reduce``);
    weighing before a reduce-scatter, its other one, sends as much, and would state the merge a second time.

    Args:
        group: the ranks.
        output: [T, W·N, L] of all heads, over the keys of this rank.
        lse: [W·N, T].

    Returns:
        [T, N, L] of the dtype of ``output``.
    """
    outputs = group.all_to_all(output.unflatten(1, (group.world_size, -1)).transpose(0, 1))
    lses = group.all_to_all(lse.unflatten(0, (group.world_size, -1)))
    merged, _ = reduce(lambda one, other: merge(*one, *other), zip(outputs, lses, strict=True))
    return merged.to(output.dtype)
