"""Backends whose result is right, and which leave the process otherwise, raise, or return it as something else."""

import builtins
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_conformance.backends.eager import EagerPrefillBackend

setattr_ = setattr
kept: list[object] = []
"""What would end if nobody held it."""


class Hostile(EagerPrefillBackend):
    """EAGER, and something after it."""

    disturb: Callable[[], object] = staticmethod(lambda: None)
    returned: Callable[[Any, Any], object] = staticmethod(lambda output, lse: (output, lse))

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        type(self).disturb()
        return type(self).returned(output, lse)


class RefusesEverything(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no function may be called")


class DispatchesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no operation may be dispatched")


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not with me")


class OddPair(tuple):
    """A pair that counts, and tells its items, wrongly."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no items")

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no item")


class Own(BaseException):
    """Neither has it a text, nor does its class have a name."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def replace_the_interpreters() -> None:
    """Functions by which what was replaced is found."""
    for name in ("len", "isinstance", "next", "getattr", "setattr", "zip", "map", "filter", "all", "any", "dict"):
        setattr_(builtins, name, lambda *_: 0)
    del builtins.iter


def entered(mode: Any) -> None:
    kept.append(mode)
    mode.__enter__()


def raised(error: BaseException | type[BaseException]) -> None:
    raise error


def freed(output: torch.Tensor, lse: torch.Tensor) -> Any:
    output.untyped_storage().resize_(0)
    return output, lse


def overridden(output: torch.Tensor, lse: torch.Tensor) -> Any:
    """Wrong, with a method that would say otherwise."""
    wrong = torch.zeros_like(output)
    wrong.double = output.double  # type: ignore[method-assign]
    return wrong, lse


DISTURB: dict[str, Callable[[], object]] = {
    "LeavesAutocastOn": lambda: entered(torch.autocast("cpu")),
    "LeavesInferenceModeOn": lambda: entered(torch.inference_mode()),
    "LeavesAFunctionMode": lambda: entered(RefusesEverything()),
    "LeavesADispatchMode": lambda: entered(DispatchesNothing()),
    "LeavesADevice": lambda: entered(torch.device("meta")),
    "HidesAMethod": lambda: setattr(torch.Tensor, "exp", lambda self: self),
    "ReplacesAFunction": lambda: setattr(torch, "exp", torch.zeros_like),
    "RemovesAFunction": lambda: delattr(torch.nn.functional, "softmax"),
    "ReplacesNumpy": lambda: setattr(np, "asarray", np.zeros_like),
    "ReplacesTheInterpreters": replace_the_interpreters,
    "MultipliesRoughly": lambda: torch.set_float32_matmul_precision("medium"),
    "AllowsTF32": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "ForbidsTF32OfCudnn": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "ChangesThreads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "FlushesDenormals": lambda: torch.set_flush_denormal(True),
    "FiltersWarnings": lambda: warnings.filterwarnings("error", message="hostile"),
    "HandlesASignal": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "SetsAnAlarm": lambda: signal.alarm(3600),
    "LimitsFiles": lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (10**6, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    ),
    "LeavesAChild": lambda: kept.append(subprocess.Popen(["sleep", "600"], start_new_session=True)),
    "ChangesTheMask": lambda: os.umask(0o7),
    "Interrupts": lambda: raised(KeyboardInterrupt),
    "Generates": lambda: raised(GeneratorExit),
    "RaisesItsOwn": lambda: raised(Own),
    "RaisesAGroup": lambda: raised(BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("too small")])),
    "RunsOutInAGroup": lambda: raised(
        ExceptionGroup("several", [ValueError("too small"), ExceptionGroup("inner", [MemoryError()])])
    ),
}
RETURNED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "Sparse": lambda output, lse: (output.to_sparse(), lse),
    "Nested": lambda output, lse: (torch.nested.nested_tensor(list(output)), lse),
    "Fake": lambda output, lse: (FakeTensorMode().from_tensor(output), lse),
    "Subclass": lambda output, lse: (output.as_subclass(Refusing), lse),
    "Quantized": lambda output, lse: (torch.quantize_per_tensor(output.float(), 0.1, 0, torch.qint8), lse),
    "Freed": freed,
    "Negated": lambda output, lse: (torch._neg_view(-output), lse),
    "Meta": lambda output, lse: (output.to("meta"), lse),
    "Dictionary": lambda output, lse: {"output": output, "lse": lse},
    "Generator": lambda output, lse: (tensor for tensor in (output, lse)),
    "Text": lambda output, lse: ("output", lse),
    "Scalar": lambda output, lse: (output.sum(), lse),
    "Pair": lambda output, lse: OddPair((output, lse)),
    "List": lambda output, lse: [output, lse],
    "Learns": lambda output, lse: (output.requires_grad_(), lse.requires_grad_()),
    "Overrides": overridden,
}
for name, function in DISTURB.items():
    globals()[name] = type(name, (Hostile,), {"disturb": staticmethod(function)})
for name, other in RETURNED.items():
    globals()[name] = type(name, (Hostile,), {"returned": staticmethod(other)})
