"""Ranks of context parallelism in one process, for whoever has no process for each."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_conformance.backends.layer.context_parallel import ContextParallelGroup


class Lockstep:
    """Ranks as threads of which one runs at a time; one that waits for what others give lets them run.

    Args:
        world_size: how many ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.groups = tuple(LockstepGroup(world_size, rank, self) for rank in range(world_size))
        self._turn = threading.Condition()

    def run(self, steps: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each rank's step returned.

        Raises:
            BaseException: what a step raised; of several the first, since others may have waited for that rank.
        """
        self._given: list[list[torch.Tensor]] = [[] for _ in steps]
        self._ended: set[int] = set()
        self._errors: list[BaseException] = []
        results: list[Any] = [None for _ in steps]
        threads = [
            threading.Thread(target=self._take_part, args=(rank, step, results)) for rank, step in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return results

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank gave at the same place of its order; ``rank`` gives ``x``.

        Raises:
            RuntimeError: another rank ended before, or gave something of another form.
        """
        number = len(self._given[rank])
        self._given[rank].append(x.clone())
        self._turn.notify_all()
        self._turn.wait_for(
            lambda: all(len(given) > number for given in self._given) or bool(self._ended_before(number))
        )
        if ended := self._ended_before(number):
            raise RuntimeError(f"rank {rank} waits in exchange {number}, and rank {ended[0]} ended before it")
        every = [given[number] for given in self._given]
        if len({(part.shape, part.dtype) for part in every}) > 1:
            raise RuntimeError(f"expected tensors of one form from all ranks, got {[list(x.shape) for x in every]}")
        return every

    def _ended_before(self, number: int) -> list[int]:
        return [rank for rank in self._ended if len(self._given[rank]) <= number]

    def _take_part(self, rank: int, step: Callable[[], Any], results: list[Any]) -> None:
        with self._turn:
            try:
                results[rank] = step()
            except BaseException as error:
                self._errors.append(error)
            self._ended.add(rank)
            self._turn.notify_all()


@dataclass(frozen=True)
class LockstepGroup(ContextParallelGroup):
    """The ranks of a :class:`Lockstep` as one of them sees them."""

    world_size: int
    rank: int
    _lockstep: Lockstep = field(repr=False)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...], copies of what was given."""
        return torch.stack(self._lockstep.exchange(self.rank, x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[W, ...], copies of what was given."""
        return torch.stack([given[self.rank] for given in self._lockstep.exchange(self.rank, x)])
