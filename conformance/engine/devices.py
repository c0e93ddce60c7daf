"""GPUs as a run and its workers see them, and what a worker tells of its device to a parent without torch."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_conformance.engine.limits import machine_cores

if TYPE_CHECKING:
    from torch import device as Device

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_ON_GPU = 6
"""Workers of a GPU: more of them are no faster, since contexts take turns, and each has less of its memory."""
MOST_AHEAD = 8  # workers of a GPU beside those, where a backend compiles, which takes cores and hardly a GPU
WORKER_BYTES = 12 * 2**30
"""What a GPU has for each of its workers: 2 GiB of kept inputs and golden results, two contexts, and most cases."""
AHEAD_BYTES = 8 * 2**30  # what it has for each worker where some compile
CONTEXT_BYTES = 2 * 2**30
"""What a process takes of a GPU beside what torch allocates: its context, code, and local memory of kernels."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class GpuPart:
    """What the places of a GPU have of it while tasks are carried out."""

    share: int | None = None  # bytes that each has for itself; None without a limit
    common: int = 0  # bytes beside the shares, for cases that exceed one
    # whether one place has the GPU, while the others have given back what they need not hold of it
    is_alone: bool = False
    is_cleared: bool = False  # whether these have begun anew as well, and hold nothing of it


WHOLE, ALONE, CLEARED = GpuPart(), GpuPart(is_alone=True), GpuPart(is_alone=True, is_cleared=True)


def part_of(memory: int, workers: int) -> GpuPart:
    """What so many workers have, in bytes, of the memory of the GPU that they share: half is shared out among them."""
    if workers == 1:
        return WHOLE
    free = memory - workers * CONTEXT_BYTES
    share = free // 2 // workers
    return GpuPart(share, free - workers * share)


def this_machine() -> dict[str, str]:
    """What of a run's environment is known without torch."""
    return {"python": sys.version.split()[0], "driver": driver_version()}


def driver_version() -> str:
    """Version of the GPU's driver; empty where the system does not tell."""
    reported = _DRIVER.read_text(encoding="utf-8") if _DRIVER.exists() else ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", reported)
    return found[0] if found else ""


def may_have_gpu() -> bool:
    """Whether torch has to be asked if there is a GPU; no device file, no GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_device(name: str) -> "Device | None":
    """The device of this name, by default CUDA where there is one; None if it is not there."""
    import torch

    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")


def device_facts(device: "Device") -> dict[str, str]:
    import torch

    from mla_conformance.backends.platform import describe_device, get_device_capability

    capability, versions = get_device_capability(device), dict[str, str]()
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        cuda = {"cuda": str(torch.version.cuda), "cudnn": "" if cudnn is None else str(cudnn)}
        versions = {"driver": driver_version(), **cuda}
    return {
        "device": describe_device(device),
        "compute_capability": str(capability) if capability else "",
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "platform": sys.platform,
        **versions,
    }


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as the environment variable names them."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count()
    return tuple(named[:count] or map(str, range(count)))


def workers_on(gpus: int, memory: int) -> int:
    """How many workers GPUs with so many bytes each are shared out among; each has a core for itself."""
    return gpus * max(1, min(MOST_ON_GPU, machine_cores() // gpus, memory // WORKER_BYTES))


def ahead_on(gpus: int, memory: int, workers: int) -> int:
    """How many more compile what is judged later: as many as cores and memory are left for."""
    cores, room = machine_cores() - workers, memory // AHEAD_BYTES - workers // gpus
    return gpus * max(0, min(MOST_AHEAD, cores // gpus, room))
