"""What a kernel leaves behind, raises or returns is its own failure, and no later case's."""

import builtins
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.driving import settings
from mla_conformance.driving.driver import run_step
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.tests.drawn import judged

LEFT = {
    "LeavesAutocastOn": "autocast on cpu from (False, torch.bfloat16) to (True, torch.bfloat16)",
    "LeavesInferenceModeOn": "inference mode from False to True",
    "LeavesAFunctionMode": "function modes from [] to ['RefusesEverything']",
    "LeavesADispatchMode": "dispatch modes from [] to ['DispatchesNothing']",
    "LeavesADevice": "default device from cpu to meta",
    "HidesAMethod": "torch.Tensor.exp was replaced",
    "ReplacesAFunction": "torch.exp was replaced",
    "RemovesAFunction": "torch.nn.functional.softmax was replaced",
    "ReplacesNumpy": "numpy.asarray was replaced",
    "ReplacesTheInterpreters": "builtins.len was replaced",
    "MultipliesRoughly": "float32 matmul precision from highest to medium",
    "AllowsTF32": "float32 precision of CUDA's matmul from ieee to tf32",
    "ForbidsTF32OfCudnn": "TF32 of cuDNN from True to False",
    "ChangesThreads": "number of threads from ",
    "FlushesDenormals": "floating-point control (rounding, denormals) from 0x1f80 to 0x9fc0",
    "FiltersWarnings": "warning filters from ",
    "HandlesASignal": "handler of SIGUSR2 from 0 to 1",
    "SetsAnAlarm": "timer ITIMER_REAL from off to running",
    "LimitsFiles": "resource limit RLIMIT_FSIZE from ",
    "LeavesAChild": "left 1 child process running",
    "ChangesTheMask": "umask from ",
}
OTHERWISE = {
    "Interrupts": (Check.CALL, "the call raised KeyboardInterrupt"),
    "Generates": (Check.CALL, "the call raised GeneratorExit"),
    "RaisesItsOwn": (Check.CALL, "the call raised Own: (its text cannot be made)"),
    "RaisesAGroup": (Check.CALL, "the call raised BaseExceptionGroup: several"),
    "Sparse": (Check.SHAPE, "expected a strided torch.Tensor as output, got a tensor of layout sparse_coo"),
    "Nested": (Check.SHAPE, "got a nested tensor"),
    "Fake": (Check.SHAPE, "got a FakeTensor"),
    "Subclass": (Check.SHAPE, "got a Refusing"),
    "Quantized": (Check.SHAPE, "got a quantized tensor"),
    "Freed": (Check.SHAPE, "got a tensor whose storage holds 0 bytes of "),
    "Negated": (Check.SHAPE, "got a lazily negated tensor"),
    "Meta": (Check.DEVICE, "expected output on cpu, got meta"),
    "Dictionary": (Check.SHAPE, "expected 2 tensor(s), got (dict)"),
    "Generator": (Check.SHAPE, "expected 2 tensor(s), got (generator)"),
    "Text": (Check.SHAPE, "expected 2 tensor(s), got (str, Tensor)"),
    "Scalar": (Check.SHAPE, "expected output of shape [8, 4, 16], got []"),
    "Overrides": (Check.OUTPUT, "output is 0 at "),
}
NEW_TOKENS = "new_tokens:dims=small;q=[5,3]"
CHUNKED = "chunked_context:dims=small;q=[5,3];kv=[40,3];workspace=32"


def judged_of(name: str, case: str = NEW_TOKENS) -> Record:
    return judged(f"{__name__}:{name}", case)


def children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


def process() -> list[Any]:
    """What the hostile backends change, read in another way than the driver does where there is one."""
    mask = os.umask(0)
    os.umask(mask)
    return [
        *(torch.is_autocast_enabled(), torch.is_inference_mode_enabled(), torch.zeros(1).device, children(), mask),
        *(torch.ones(1).exp(), torch.exp(torch.ones(1)), torch.nn.functional.softmax),
        *(np.asarray, dict(vars(builtins))),
        *(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        *(torch.get_num_threads(), torch.tensor(1e-40) * 1.0, list(warnings.filters), signal.getsignal(signal.SIGUSR2)),
        *(signal.getitimer(signal.ITIMER_REAL), resource.getrlimit(resource.RLIMIT_FSIZE)),
    ]


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_charged_and_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_PATIENCE", 0.0)  # what it leaves does not end by itself
    before = process()
    record = judged_of(name)
    assert process() == before
    assert (record.status, record.check) == (Status.FAIL, Check.PROCESS_STATE), record.message
    assert LEFT[name] in record.message


OF_CHUNKS = ("Interrupts", "Sparse", "Meta", "Dictionary", "Scalar")
"""Those without which there is nothing to merge, each for a reason of its own."""


@pytest.mark.parametrize(
    ("name", "case"), [(name, NEW_TOKENS) for name in OTHERWISE] + [(name, CHUNKED) for name in OF_CHUNKS]
)
def test_what_is_raised_or_returned_is_a_failure_of_the_call(name: str, case: str) -> None:
    check, said = OTHERWISE[name]
    record = judged_of(name, case)
    assert (record.status, record.check) == (Status.FAIL, check), record.message
    assert said in record.message


@pytest.mark.parametrize("name", ["Pair", "List", "Learns"])
def test_a_right_result_stays_right(name: str) -> None:
    assert judged_of(name).status is Status.PASS


def test_memory_may_run_out_in_a_group_and_a_mode_that_the_first_call_leaves_does_not_meet_the_second() -> None:
    assert judged_of("RunsOutInAGroup").status is Status.UNAVAILABLE
    assert judged_of("LeavesAFunctionMode", CHUNKED).check == Check.PROCESS_STATE


@pytest.fixture
def heeded() -> Iterator[None]:
    """Interrupts are heeded, also where the tests were started with SIGINT ignored, as a script's background is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_from_outside_is_no_failure_of_the_call(heeded: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_step(lambda: signal.raise_signal(signal.SIGINT))


def test_what_libraries_do_is_no_change() -> None:
    seed = torch.manual_seed
    with settings.watched() as changes:
        torch.Tensor.of_a_library = lambda self: self  # type: ignore[attr-defined]
        os.environ["OF_A_LIBRARY"] = "1"
        torch.set_float32_matmul_precision("high")
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed = torch._disable_dynamo(seed)  # as torch's compiler does when it is imported
    torch.manual_seed = seed
    del torch.Tensor.of_a_library, os.environ["OF_A_LIBRARY"]  # type: ignore[attr-defined]
    assert changes == []


def test_all_variables_that_a_call_lost_are_named_and_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "SECOND", "EXTENDED"):
        monkeypatch.setenv(name, "value")
    with settings.watched() as changes:
        del os.environ["FIRST"]
        os.environ.update(SECOND="another", EXTENDED="value:more")
    assert changes == ["environment variable FIRST, SECOND"]
    assert [os.environ[name] for name in ("FIRST", "SECOND")] == ["value"] * 2


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
