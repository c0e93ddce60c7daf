"""The machine of a run: what its processes may take and do, and its cores, memory and GPUs; no process outlives it."""

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mla_conformance.files.places import read_if_there

if TYPE_CHECKING:
    from torch import device as Device

_DIES_WITH_PARENT, _DROPS_FOR_GOOD, _NO_NEW_PRIVILEGES = 1, 24, 38  # for prctl, as the two below
DUMPABLE = 4  # whether those of the same user may read or trace the process; who may trace any process always can
ADOPTS_ORPHANS = 36  # whether it becomes the parent of descendants whose own parent ends, in whatever session they are
_CAP_SYS_PTRACE = 19
_CAPABILITIES_OF_64_BITS = 0x20080522
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_ASKS_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_NO_NETWORK = 0
_LANDLOCK_MAKE_FIFO, _LANDLOCK_REFER, _LANDLOCK_SCOPE_SIGNAL = 1 << 10, 1 << 13, 2
# Versions of Landlock from which on a process can give up making named pipes, and signals; of Linux 5.19 and 6.12.
FORBIDS_PIPES, _FORBIDS_SIGNALS = 2, 6
_LIBC = ctypes.CDLL(None)
LANDLOCK = 0  # the version of Landlock that this system has; less than 1 for none
if sys.platform == "linux":
    LANDLOCK = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_ASKS_VERSION)
THREADS = "OMP_NUM_THREADS"  # the variable that says how many threads torch has of its own; MKL heeds it, too
LACKED_MEMORY = 77  # exit status of a process of ours without memory to begin with, or to open what another shares
_PATIENCE = 2.0  # seconds in which a process that closed its connection ends by itself
_VMSTAT, _CGROUP_CPU = Path("/proc/vmstat"), Path("/sys/fs/cgroup/cpu.max")
VISIBLE = "CUDA_VISIBLE_DEVICES"
CONTEXT_BYTES = 2 * 2**30  # of a GPU, beside what torch allocates: a context, code, and local memory of kernels


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, value)


def end_with_parent(parent: int, signal_number: int) -> None:
    """Have the system send this process a signal when ``parent``, which started it, ends in whatever way."""
    prctl(_DIES_WITH_PARENT, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)  # it ended before


def renounce_rights() -> None:
    """Give up the rights to reach into any process, to signal any that this one did not start, and to make named pipes.

    The first is root's: memory that is not :data:`DUMPABLE` is hidden then. Call it while there is one thread: it holds
    for that one, and for what it starts. The system demands that nothing gets further rights by being executed.
    """
    if sys.platform != "linux":
        return
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_OF_64_BITS, 0), (ctypes.c_uint32 * 6)()
    _LIBC.capget(header, sets)
    for place in range(3):  # effective, permitted, inheritable; the words behind hold the capabilities from 32 on
        sets[place] &= ~(1 << _CAP_SYS_PTRACE)
    _LIBC.prctl(_DROPS_FOR_GOOD, _CAP_SYS_PTRACE)  # or a program that root executes would have it again
    _LIBC.capset(header, sets)
    if LANDLOCK < FORBIDS_PIPES:
        return
    forbidden = [_LANDLOCK_MAKE_FIFO | _LANDLOCK_REFER]
    forbidden += [_NO_NETWORK, _LANDLOCK_SCOPE_SIGNAL] if LANDLOCK >= _FORBIDS_SIGNALS else []
    words = (ctypes.c_uint64 * len(forbidden))(*forbidden)
    rules = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, words, ctypes.c_size_t(ctypes.sizeof(words)), 0)
    root = os.open("/", os.O_PATH)
    # To move files between folders, which has to be allowed where anything of files is forbidden: everywhere.
    allowed = _LANDLOCK_REFER.to_bytes(8, sys.byteorder) + root.to_bytes(4, sys.byteorder)
    _LIBC.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, allowed, 0)
    os.close(root)
    _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _LIBC.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def children(process: str = "self") -> set[int]:
    return {int(n) for task in Path(f"/proc/{process}/task").glob("*/children") for n in read_if_there(task).split()}


def programs_below(process: int) -> set[str]:
    """The names of the programs that a process, and what it started, has started; none of other users' processes."""
    below = children(str(process))
    return {read_if_there(Path(f"/proc/{child}/comm")).strip() for child in below}.union(*map(programs_below, below))


def end_of(process: int) -> list[int]:
    """A descriptor that becomes readable when a process ends; none on a system without."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def end_children(spared: set[int]) -> None:
    while strangers := children() - spared:
        for process in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)


def allocated_memory() -> int:
    sizes = read_if_there(Path("/proc/self/statm")).split()
    return int(sizes[5]) * os.sysconf("SC_PAGE_SIZE") if sizes else 0


def machine_memory() -> int:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_if_there(Path("/sys/fs/cgroup/memory.max")).strip()  # "max" without one
    return min(installed, int(limit)) if limit.isdecimal() else installed


def machine_cores() -> int:
    """How many cores this process and its siblings may use together, at least one; a runner's share of a machine."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit = re.match(r"(\d+) (\d+)", read_if_there(_CGROUP_CPU))  # of microseconds in each period; "max" without one
    return max(1, min(allowed, int(limit[1]) // int(limit[2]))) if limit else allowed


def end_as(process: int) -> NoReturn:
    end = time.monotonic() + _PATIENCE
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
    status = os.waitstatus_to_exitcode(ended[1])
    if status >= 0:
        leave(status)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # of SIGKILL it is what it is
        signal.signal(-status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    os.kill(os.getpid(), -status)
    os._exit(1)


def how_it_ends(step: Callable[[], object]) -> str:
    """How a process ended that was forked to carry out a step; empty if it came behind it, whatever that raised."""
    reported, told = os.pipe()
    process = os.fork()
    if not process:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        with contextlib.suppress(BaseException):
            step()
        os.write(told, b"!")
        os._exit(0)
    os.close(told)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.set_blocking(reported, False)  # what the step started may hold the other end
    with contextlib.suppress(BlockingIOError), open(reported, "rb", buffering=0) as answer:  # noqa: PTH123
        if answer.read(1):
            return ""
    return how(status)


def oom_kills() -> int:
    """How many processes the system has ended for want of memory since it started; 0 where it counts none."""
    found = re.search(r"^oom_kill (\d+)$", read_if_there(_VMSTAT), re.MULTILINE)
    return int(found[1]) if found else 0


def how(status: int) -> str:
    if status == LACKED_MEMORY:
        return f"exit status {status}, out of memory"
    return f"exit status {status}" if status >= 0 else signal.strsignal(-status) or f"signal {-status}"


def cause_of(status: int) -> str:
    """What a process ended by, with the number of the signal, by which people search."""
    return f"signal {-status} ({how(status)})" if status < 0 else how(status)


def leave(status: int) -> NoReturn:
    """End this process at once; to take torch, libraries and a GPU's context apart takes an interpreter a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a backend closed it
            stream.flush()
    _LIBC.fflush(None)  # what libraries printed
    os._exit(status)


@dataclass(frozen=True)
class GpuPart:
    share: int | None = None  # bytes that each has for itself; None without a limit
    common: int = 0  # bytes beside the shares, for cases that exceed one
    is_alone: bool = False  # whether one place has the GPU, while others have given back what they need not hold
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
    """What of a run's environment is known without torch; the driver is empty where the system does not tell."""
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_if_there(Path("/proc/driver/nvidia/version")))
    return {"python": sys.version.split()[0], "driver": driver[0] if driver else ""}


def may_have_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_device(name: str) -> "Device | None":
    import torch

    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")


def device_facts(device: "Device") -> dict[str, str]:
    import torch

    from mla_conformance.backends.kernel import describe_device, get_device_capability

    capability, versions = get_device_capability(device), dict[str, str]()
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        versions = {"driver": this_machine()["driver"], "cuda": str(torch.version.cuda), "cudnn": str(cudnn or "")}
    found = {"device": describe_device(device), "compute_capability": str(capability) if capability else ""}
    found |= {"torch": str(torch.__version__), "python": sys.version.split()[0], "platform": sys.platform}
    return found | versions


def visible_gpus() -> tuple[str, ...]:
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count()
    return tuple(named[:count] or map(str, range(count)))
