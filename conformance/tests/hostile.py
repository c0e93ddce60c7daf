"""Backends whose result is right, and which leave the process otherwise, raise, or return it as something else."""

import builtins
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_conformance.backends.eager import EagerPrefillBackend

setattr_ = setattr


class Hostile(EagerPrefillBackend):
    """EAGER, and something after it."""

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        self.disturb()
        return self.returned(output, lse)

    def disturb(self) -> None: ...

    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output, lse


class LeavesAutocastOn(Hostile):
    def disturb(self) -> None:
        torch.autocast("cpu").__enter__()


class LeavesInferenceModeOn(Hostile):
    def disturb(self) -> None:
        Hostile.mode = torch.inference_mode()  # type: ignore[attr-defined]
        Hostile.mode.__enter__()  # type: ignore[attr-defined]


class RefusesEverything(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no function may be called")


class DispatchesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no operation may be dispatched")


class LeavesAFunctionMode(Hostile):
    def disturb(self) -> None:
        RefusesEverything().__enter__()


class LeavesADispatchMode(Hostile):
    def disturb(self) -> None:
        DispatchesNothing().__enter__()


class LeavesADevice(Hostile):
    def disturb(self) -> None:
        torch.device("meta").__enter__()


class HidesAMethod(Hostile):
    def disturb(self) -> None:
        torch.Tensor.exp = lambda self: self  # type: ignore[method-assign, assignment, return-value]


class ReplacesAFunction(Hostile):
    def disturb(self) -> None:
        torch.exp = torch.zeros_like  # type: ignore[assignment]


class RemovesAFunction(Hostile):
    def disturb(self) -> None:
        del torch.nn.functional.softmax


class ReplacesNumpy(Hostile):
    def disturb(self) -> None:
        np.asarray = np.zeros_like  # type: ignore[assignment]


class ReplacesTheInterpreters(Hostile):
    """Functions by which what was replaced is found."""

    def disturb(self) -> None:
        for name in ("len", "isinstance", "next", "getattr", "setattr", "zip", "map", "filter", "all", "any", "dict"):
            setattr_(builtins, name, lambda *_: 0)
        del builtins.iter


class MultipliesRoughly(Hostile):
    def disturb(self) -> None:
        torch.set_float32_matmul_precision("medium")


class AllowsTF32(Hostile):
    def disturb(self) -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"


class ForbidsTF32OfCudnn(Hostile):
    def disturb(self) -> None:
        torch.backends.cudnn.allow_tf32 = False


class ChangesThreads(Hostile):
    def disturb(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


class FlushesDenormals(Hostile):
    def disturb(self) -> None:
        torch.set_flush_denormal(True)


class FiltersWarnings(Hostile):
    def disturb(self) -> None:
        warnings.filterwarnings("error", message="hostile")


class HandlesASignal(Hostile):
    def disturb(self) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class SetsAnAlarm(Hostile):
    def disturb(self) -> None:
        signal.alarm(3600)


class LimitsFiles(Hostile):
    def disturb(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class LeavesAChild(Hostile):
    def disturb(self) -> None:
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)


class ChangesTheMask(Hostile):
    def disturb(self) -> None:
        os.umask(0o7)


class Interrupts(Hostile):
    def disturb(self) -> None:
        raise KeyboardInterrupt


class Generates(Hostile):
    def disturb(self) -> None:
        raise GeneratorExit


class RaisesItsOwn(Hostile):
    class Own(BaseException):
        """Neither has it a text, nor does its class have a name."""

        def __str__(self) -> str:
            raise KeyboardInterrupt

    def disturb(self) -> None:
        raise self.Own


class RaisesAGroup(Hostile):
    def disturb(self) -> None:
        raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("too small")])


class RunsOutInAGroup(Hostile):
    def disturb(self) -> None:
        raise ExceptionGroup("several", [ValueError("too small"), ExceptionGroup("inner", [MemoryError()])])


class Sparse(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output.to_sparse(), lse


class Nested(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return torch.nested.nested_tensor(list(output)), lse


class Fake(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return FakeTensorMode().from_tensor(output), lse


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not with me")


class Subclass(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output.as_subclass(Refusing), lse


class Quantized(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return torch.quantize_per_tensor(output.float(), 0.1, 0, torch.qint8), lse


class Freed(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        output.untyped_storage().resize_(0)
        return output, lse


class Negated(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return torch._neg_view(-output), lse


class Meta(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output.to("meta"), lse


class Dictionary(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return {"output": output, "lse": lse}


class Generator(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return (tensor for tensor in (output, lse))


class Text(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return "output", lse


class Scalar(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output.sum(), lse


class OddPair(tuple):
    """A pair that counts, and tells its items, wrongly."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no items")

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no item")


class Pair(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return OddPair((output, lse))


class List(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return [output, lse]


class Learns(Hostile):
    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output.requires_grad_(), lse.requires_grad_()


class Overrides(Hostile):
    """Wrong, with a method that would say otherwise."""

    def returned(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        wrong = torch.zeros_like(output)
        wrong.double = output.double  # type: ignore[method-assign]
        return wrong, lse
