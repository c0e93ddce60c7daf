"""GPUs as a run and its workers see them."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.engine.limits import machine_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_ON_GPU = 6
"""Workers of a GPU: with more of them, more cases exceed a share of its memory, and contexts take turns for longer."""
WORKER_BYTES = 12 * 2**30
"""What a worker takes of a GPU: 2 GiB of kept inputs and golden results, three contexts, and most cases."""
CONTEXT_BYTES = 2**30
"""What a process takes of a GPU beside what torch allocates: its context, and code."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class GpuPart:
    """What a place has of its GPU while tasks are carried out.

    Attributes:
        places: how many of each GPU take part, while the others have given back what they held; 0 for all.
        share: bytes for each; None without a limit.
    """

    places: int = 0
    share: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has the GPU."""
        return self.places == 1


WHOLE, ALONE = GpuPart(), GpuPart(places=1)


def parts_of(memory: int, workers: int) -> tuple[GpuPart, ...]:
    """What so many workers have, one after the other, of the memory of the GPU that they share, in bytes.

    What exceeds a share is judged by half as many, rounded up, among whom all of it is shared out, down to two.
    """
    if workers == 1:
        return (WHOLE,)
    free = memory - workers * CONTEXT_BYTES
    found = [GpuPart(share=free // workers)]
    while (workers := -(-workers // 2)) > 1:
        found.append(GpuPart(workers, free // workers))
    return tuple(found)


def this_machine() -> dict[str, str]:
    """What of a run's environment is known without torch."""
    return {"python": sys.version.split()[0], "driver": driver_version()}


def driver_version() -> str:
    """Version of the GPU's driver; empty where the system does not tell."""
    return driver_in(_DRIVER.read_text(encoding="utf-8")) if _DRIVER.exists() else ""


def driver_in(reported: str) -> str:
    """The version in what the kernel module tells of itself; empty if there is none."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", reported)
    return found[0] if found else ""


def may_have_gpu() -> bool:
    """Whether torch has to be asked if there is a GPU; no device file, no GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as the environment variable names them."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count()
    return tuple(named[:count] or map(str, range(count)))


def workers_on(gpus: int, memory: int) -> int:
    """How many workers GPUs with so many bytes each are shared out among; each has a core for itself."""
    return gpus * max(1, min(MOST_ON_GPU, machine_cores() // gpus, memory // WORKER_BYTES))
