"""One GPU and one cache of compiled kernels for each place of a run."""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/version")
_JIT_CACHES = (
    "CUDA_CACHE_PATH",
    "CUTE_DSL_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
)


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


def jit_caches(backends: Sequence[str]) -> Path:
    """The folder of the places' caches for a choice of backends, kept from run to run."""
    key = backends[0] if len(backends) == 1 else hashlib.sha256("\n".join(backends).encode()).hexdigest()[:12]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-conformance" / "jit" / key


def place_environment(gpu: str, cache: Path) -> dict[str, str]:
    """Variables of a process that has one GPU for itself, and compiles into a folder that no other compiles into."""
    own = {name: str(cache / name.lower()) for name in _JIT_CACHES if name not in os.environ}
    return {VISIBLE: gpu, **own}
