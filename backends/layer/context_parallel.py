"""The ranks that share the tokens of each sequence: which of them stores what, and what passes between them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor


class Sharding(NamedTuple):
    """Ranks take turns of ``interleave`` consecutive tokens: token t belongs to rank (t // interleave) % world_size."""

    world_size: int = 1
    rank: int = 0
    interleave: int = 1


def local_seq_lens(seq_lens: Tensor, sharding: Sharding) -> Tensor:
    """[B] tokens of each sequence on this rank."""
    turn = sharding.world_size * sharding.interleave
    left = seq_lens % turn - sharding.rank * sharding.interleave
    return seq_lens // turn * sharding.interleave + left.clamp(min=0, max=sharding.interleave)


def local_token(token: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """(rank that stores each token, its number among the tokens of that rank)."""
    turns, within = token // sharding.interleave, token % sharding.interleave
    return turns % sharding.world_size, turns // sharding.world_size * sharding.interleave + within


class ContextParallelGroup(ABC):
    """Ranks of decode context parallelism, as one of them sees them; all make the same exchanges in the same order."""

    world_size: int  # W, how many they are
    rank: int  # which one this is

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """[W, ...]: what each rank gave, all of one shape and dtype."""

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """[W, ...] from [W, ...]: what each rank had for this one in its row ``rank``."""


class OnlyRank(ContextParallelGroup):
    world_size, rank = 1, 0

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x


class DistributedGroup(ContextParallelGroup):
    """Ranks in processes of their own: those of a group of ``torch.distributed``, or all of them."""

    def __init__(self, process_group: Any = None) -> None:
        self._process_group = process_group
        self.world_size = torch.distributed.get_world_size(process_group)
        self.rank = torch.distributed.get_rank(process_group)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.world_size, *x.shape)
        torch.distributed.all_gather(list(gathered), x.contiguous(), group=self._process_group)
        return gathered

    def all_to_all(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, x.contiguous(), group=self._process_group)
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


class Lockstep:
    """Ranks as threads of which one runs at a time; one that waits for what others give lets them run."""

    def __init__(self, world_size: int) -> None:
        self.groups = tuple(LockstepGroup(world_size, rank, self) for rank in range(world_size))
        self._turn = threading.Condition()

    def run(self, steps: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each rank's step returned; raises what the first of them raised, for which others may have waited."""
        self._given: list[list[Tensor]] = [[] for _ in steps]
        self._ended: set[int] = set()
        errors: list[BaseException] = []

        def take_part(rank: int, step: Callable[[], Any]) -> Any:
            with self._turn:
                try:
                    return step()
                except BaseException as error:
                    errors.append(error)
                finally:
                    self._ended.add(rank)
                    self._turn.notify_all()

        with ThreadPoolExecutor(len(steps)) as threads:
            results = list(threads.map(take_part, range(len(steps)), steps))
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What each rank gave at the same place of its order, all of one form; ``rank`` gives ``x``."""
        number = len(self._given[rank])
        self._given[rank].append(x.clone())
        self._turn.notify_all()

        def missing() -> list[int]:
            return [other for other, given in enumerate(self._given) if len(given) <= number]

        self._turn.wait_for(lambda: not missing() or bool(self._ended.intersection(missing())))
        if ended := [other for other in missing() if other in self._ended]:
            raise RuntimeError(f"rank {rank} waits in exchange {number}, and rank {ended[0]} ended before it")
        every = [given[number] for given in self._given]
        if len({(part.shape, part.dtype) for part in every}) > 1:
            raise RuntimeError(f"expected tensors of one form from all ranks, got {[list(x.shape) for x in every]}")
        return every


@dataclass(frozen=True)
class LockstepGroup(ContextParallelGroup):
    world_size: int
    rank: int
    _lockstep: Lockstep = field(repr=False)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._lockstep.exchange(self.rank, x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([given[self.rank] for given in self._lockstep.exchange(self.rank, x)])
