"""Backends that misbehave on purpose, on one case each; everything else they do as EAGER does."""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from mla_conformance.backends.eager import EagerPrefillBackend


class Faulty(EagerPrefillBackend):
    """Misbehaves from the first call on whose requests start there."""

    start_loc: ClassVar = [0, 7, 11]
    armed = False

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        if self._prefill_metadata.query_start_loc.tolist() == self.start_loc:
            self.armed = True
            self.before(q)
        result = super().run_prefill_new_tokens(q, k, v, *arguments, **options)
        return self.after(result, q) if self.armed else result

    def before(self, q: torch.Tensor) -> None:
        name = type(self).__name__
        if name in ON_A_GPU:
            ON_A_GPU[name](q)
            torch.cuda.synchronize()
        elif fault := (BEFORE | HANGS).get(name):
            fault()

    def after(self, result: Any, q: torch.Tensor) -> Any:
        return result


class Hanging(Faulty):
    """On another case: one worker waits for these while another one judges the rest."""

    start_loc: ClassVar = [0, 2]


def loop() -> None:
    """In Python, but leaves the core to the other workers."""
    while True:
        time.sleep(0.01)


def compile_for_long() -> None:
    compiler = shutil.copy(shutil.which("sleep") or "", Path(__file__).with_name("nvcc"))
    subprocess.run([compiler, "60"])


def note_child(process: int) -> None:
    """Tell the test, in a file beside this one, which process must not be left."""
    with Path(__file__).with_name("children").open("a") as file:
        file.write(f"{process}\n")


def leave_a_child_and_abort() -> None:
    note_child(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    os.abort()


def kill_the_parent() -> None:
    """And leave a child in a session of its own, which holds whatever its parent had opened."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(1000)
    note_child(child)
    with contextlib.suppress(PermissionError):  # which the system may refuse
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def flood() -> None:
    for descriptor in (1, 2) * 24:
        os.write(descriptor, b"x" * 2**20)


def close_stdout() -> None:
    sys.stdout.close()
    os.closerange(1, 2)


def say_for_ever(data: bytes) -> None:
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            os.write(int(link.name), data)
    os.read(os.pipe()[0], 1)


def shout() -> NoReturn:
    raise RuntimeError("A" * 30_000_000)


def fork() -> None:
    if os.fork() == 0:
        torch.set_num_threads(1)  # the child has none of its parent's threads, and would wait for them


def leak() -> None:
    leaked = []
    while True:
        leaked.append(torch.empty(2**26, dtype=torch.uint8))


_KERNELS = r"""
extern "C" __global__ void illegal_address(char *p) { *(volatile int *)(p + (1ll << 46)) = 1; }
extern "C" __global__ void misaligned(char *p) { *(volatile int *)(p + 1) = 1; }
extern "C" __global__ void trap(char *p) { asm volatile("trap;"); }
extern "C" __global__ void clear(char *p) { p[threadIdx.x] = 0; }
"""


@cache
def kernel(name: str) -> Any:
    torch.special.airy_ai(torch.zeros(1, device="cuda"))  # compiled at run time as well: torch has loaded NVRTC then
    return torch.cuda._compile_kernel(_KERNELS, name)


BEFORE: dict[str, Callable[[], object]] = {
    "Segfault": lambda: ctypes.string_at(0),
    "Killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "KillsItsGroup": lambda: os.killpg(0, signal.SIGKILL),
    "InterruptsItself": lambda: os.kill(os.getpid(), signal.SIGINT),
    "ExitsAtOnce": lambda: os._exit(0),
    "ForbidsFiles": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    "Signals": lambda: os.kill(os.getppid(), signal.SIGCONT),  # who may do that may stop or end the judge as well
    "Compiles": compile_for_long,
    "LeavesAChildAndAborts": leave_a_child_and_abort,
    "KillsItsParent": kill_the_parent,
    "Floods": flood,
    "ClosesStdout": close_stdout,
    "Forks": fork,
    "Shouts": shout,
    "SaysWhatEndsNever": lambda: say_for_ever(b"[" * 20_000_000),
    "Leaks": leak,
}
HANGS: dict[str, Callable[[], object]] = {
    "SaysTooLittle": lambda: say_for_ever(b"{}\n"),  # for a reply, of which the rest is waited for
    "Loops": loop,
    "KeepsTheInterpreterLock": lambda: ctypes.PyDLL(None).sleep(10**6),
    "StopsItself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
ON_A_GPU: dict[str, Callable[[torch.Tensor], object]] = {
    "IllegalAddress": lambda q: kernel("illegal_address")(args=[q]),
    "Misaligned": lambda q: kernel("misaligned")(args=[q]),
    "DeviceAssert": lambda q: torch.zeros(4, device=q.device)[torch.tensor([9], device=q.device)],
}


for name in BEFORE | HANGS | ON_A_GPU:
    globals()[name] = type(name, (Hanging if name in HANGS else Faulty,), {})


class ReturnsItsBuffer(Faulty):
    def after(self, result: Any, q: torch.Tensor) -> Any:
        buffer = self.__dict__.setdefault("buffer", torch.empty(self.num_heads, 64))
        return result[0], buffer[:, : result[1].shape[1]].copy_(result[1])


class FailsAfterItReturned(Faulty):
    """The launch is in flight when the result is returned: no exception reaches this backend."""

    def after(self, result: Any, q: torch.Tensor) -> Any:
        kernel("trap")(args=[q])
        return result


class TellsTooMuch(Faulty):
    def kernel_evidence(self) -> dict[str, str]:
        return {"k" * 9_000_000: "v" * 9_000_000}


class NeverLaunches(Faulty):
    """The driver refuses a launch with too many threads, nobody looks at the error, and out stays as it was."""

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, *arguments: Any, out: Any = None, **options: Any) -> Any:
        if self._prefill_metadata.query_start_loc.tolist() != self.start_loc:
            return super().run_prefill_new_tokens(q, k, v, *arguments, out=out, **options)
        _, lse = super().run_prefill_new_tokens(q, k, v, *arguments, **options)
        with contextlib.suppress(RuntimeError):
            kernel("clear")(block=(4096, 1, 1), args=[out])
        return out, lse
