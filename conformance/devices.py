"""One GPU for each worker of a run: a worker takes a free place, and its successor takes the place that it leaves."""

import fcntl
import os
import time
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 10.0
_POLL_SECONDS = 0.1


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as the environment variable names them."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count()
    return tuple(named[:count] or map(str, range(count)))


def take_gpu(folder: Path, gpus: tuple[str, ...], workers: int) -> str:
    """Make one GPU the only one of this process, before anything of CUDA is initialised.

    Args:
        folder: of the run's workers, who share out their places in it.
        gpus: as :func:`visible_gpus` names them; several workers share one if there are more workers.
        workers: how many there are at a time.
    """
    gpu = gpus[take_place(folder, workers) % len(gpus)]
    os.environ[VISIBLE] = gpu
    return gpu


def take_place(folder: Path, workers: int) -> int:
    """The first number below ``workers`` that no living worker has; this process keeps it until it ends."""
    folder.mkdir(exist_ok=True)
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        for place in range(workers):
            if _lock(folder / f"{place}.place"):
                return place
        time.sleep(_POLL_SECONDS)  # a predecessor is still ending
    return os.getpid() % workers


def _lock(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True  # the descriptor stays open: the lock ends with the process
