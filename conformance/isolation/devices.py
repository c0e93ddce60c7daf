"""One GPU and one JIT cache for each worker of a run: a worker takes a free place, its successor the one it leaves."""

import fcntl
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_JIT_CACHES = (
    "CUDA_CACHE_PATH",
    "CUTE_DSL_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
)
_PATIENCE = 10.0
_POLL_SECONDS = 0.1


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as the environment variable names them."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count()
    return tuple(named[:count] or map(str, range(count)))


def jit_caches(backends: Sequence[str]) -> Path:
    """The folder of the workers' caches for a choice of backends, kept from run to run."""
    key = backends[0] if len(backends) == 1 else hashlib.sha256("\n".join(backends).encode()).hexdigest()[:12]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-conformance" / "jit" / key


def use_gpu(place: int, gpus: Sequence[str]) -> None:
    """Make one GPU the only one of this process, before anything of CUDA is initialised; places may share one."""
    os.environ[VISIBLE] = gpus[place % len(gpus)]


def use_jit_cache(folder: Path) -> None:
    """Have libraries compile into a folder that no other living process compiles into, unless told otherwise."""
    for name in _JIT_CACHES:
        os.environ.setdefault(name, str(folder / name.lower()))


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
