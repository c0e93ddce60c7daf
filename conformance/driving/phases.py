"""Where a trial's time goes: inputs, golden result, calls, judge."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by phase of one trial."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Add the wall time of what happens inside to ``name``, with the work of the device if one is given."""
        started = time.perf_counter()
        try:
            yield
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by phase so far."""
        return {name: round(seconds, 4) for name, seconds in self._spent.items()}
