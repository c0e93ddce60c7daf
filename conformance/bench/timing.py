"""Timing of work on a device: warmed up, with events on a GPU, as a median with its spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPETITIONS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one repetition: the median, the shortest and the longest."""

    median: float
    shortest: float
    longest: float

    def __str__(self) -> str:
        return f"{self.median:.4g} s ({self.shortest:.4g} to {self.longest:.4g})"


def timed(work: Callable[[], object], device: torch.device, repetitions: int = REPETITIONS) -> Timing:
    """Run once to warm up, then so many times."""
    work()
    measure = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    seconds = [measure(work) for _ in range(repetitions)]
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def _gpu_seconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
