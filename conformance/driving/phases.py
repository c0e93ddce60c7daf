"""Where a trial's time goes: golden result, calls, judge. A process judges one trial at a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_spent: dict[str, float] = {}


@contextmanager
def phase(name: str, device: torch.device | None = None) -> Iterator[None]:
    """Add the wall time of what happens inside to ``name``, with the work of the device if one is given."""
    started = time.perf_counter()
    try:
        yield
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        _spent[name] = _spent.get(name, 0.0) + time.perf_counter() - started


def spent() -> dict[str, float]:
    """Seconds by phase since this was last asked."""
    found = {name: round(seconds, 4) for name, seconds in _spent.items()}
    _spent.clear()
    return found
