"""Measuring what runs: the kernels of a call under torch's profiler, and the shared libraries of the process."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mla_conformance.files.installed import file_digest
from mla_conformance.files.places import place_of

_MAPS = Path("/proc/self/maps")
_LONGEST = 240
"""Characters of a kernel's name that are kept: templates of CUTLASS run to thousands."""
_CALLS_OF_THE_HOST = ("cuda", "cuLaunch", "Activity", "INVALID", "Lazy Function Loading")


def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Names of the kernels that a GPU ran meanwhile, in alphabetical order."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize(device)
    names = {event.key[:_LONGEST] for event in found.key_averages()}
    return tuple(sorted(name for name in names if not name.startswith(_CALLS_OF_THE_HOST)))


def loaded_libraries() -> set[str]:
    """Paths of the shared libraries that are mapped into this process; none where the system does not tell."""
    if not _MAPS.exists():
        return set()
    paths = {line.rpartition(" ")[2] for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()}
    return {path for path in paths if ".so" in Path(path).suffixes and Path(path).is_file()}


def library_digests(paths: set[str], beside: Path | None = None) -> dict[str, str]:
    """SHA-256 of each file by the name that it has on every machine; ``beside`` is the file of a backend."""
    return {place_of(Path(path), beside): file_digest(Path(path)) for path in sorted(paths)}
