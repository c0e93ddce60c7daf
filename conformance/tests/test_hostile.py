"""What a kernel leaves behind, raises or returns is its own failure, and no later case's."""

import builtins
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
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


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "LeavesAutocastOn": (
        lambda: entered(torch.autocast("cpu")), "autocast on cpu from (False, torch.bfloat16) to (True, torch.bfloat16)"
    ),
    "LeavesInferenceModeOn": (lambda: entered(torch.inference_mode()), "inference mode from False to True"),
    "LeavesAFunctionMode": (lambda: entered(RefusesEverything()), "function modes from [] to ['RefusesEverything']"),
    "LeavesADispatchMode": (lambda: entered(DispatchesNothing()), "dispatch modes from [] to ['DispatchesNothing']"),
    "LeavesADevice": (lambda: entered(torch.device("meta")), "default device from cpu to meta"),
    "HidesAMethod": (lambda: setattr(torch.Tensor, "exp", lambda self: self), "torch.Tensor.exp was replaced"),
    "ReplacesAFunction": (lambda: setattr(torch, "exp", torch.zeros_like), "torch.exp was replaced"),
    "RemovesAFunction": (
        lambda: delattr(torch.nn.functional, "softmax"), "torch.nn.functional.softmax was replaced"
    ),
    "ReplacesNumpy": (lambda: setattr(np, "asarray", np.zeros_like), "numpy.asarray was replaced"),
    "ReplacesTheInterpreters": (replace_the_interpreters, "builtins.len was replaced"),
    "MultipliesRoughly": (
        lambda: torch.set_float32_matmul_precision("medium"), "float32 matmul precision from highest to medium"
    ),
    "AllowsTF32": (
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        "float32 precision of CUDA's matmul from ieee to tf32",
    ),
    "ForbidsTF32OfCudnn": (
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "TF32 of cuDNN from True to False"
    ),
    "ChangesDtype": (
        lambda: torch.set_default_dtype(torch.float64), "default dtype from torch.float32 to torch.float64"
    ),
    "ChangesDirectory": (lambda: os.chdir("/"), "working directory from"),
    "Seeds": (lambda: torch.manual_seed(12345), "seed from"),
    "ChangesThreads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads from "),
    "FlushesDenormals": (
        lambda: torch.set_flush_denormal(True), "floating-point control (rounding, denormals) from 0x1f80 to 0x9fc0"
    ),
    "FiltersWarnings": (lambda: warnings.filterwarnings("error", message="hostile"), "warning filters from "),
    "HandlesASignal": (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), "handler of SIGUSR2 from 0 to 1"),
    "SetsAnAlarm": (lambda: signal.alarm(3600), "timer ITIMER_REAL from off to running"),
    "LimitsFiles": (
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.getrlimit(resource.RLIMIT_FSIZE)[1])),
        "resource limit RLIMIT_FSIZE from ",
    ),
    "LeavesAChild": (
        lambda: kept.append(subprocess.Popen(["sleep", "600"], start_new_session=True)), "left 1 child process running"
    ),
    "ChangesTheMask": (lambda: os.umask(0o7), "umask from "),
}  # fmt: skip
"""What a call leaves behind, and what is said of it."""
RAISED: dict[str, tuple[BaseException | type[BaseException], str]] = {
    "Exits": (SystemExit(0), "the call raised SystemExit: 0"),
    "Interrupts": (KeyboardInterrupt, "the call raised KeyboardInterrupt"),
    "Generates": (GeneratorExit, "the call raised GeneratorExit"),
    "RaisesItsOwn": (Own, "the call raised Own: (its text cannot be made)"),
    "RaisesAGroup": (
        BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("too small")]),
        "the call raised BaseExceptionGroup: several",
    ),
    "RunsOutInAGroup": (
        ExceptionGroup("several", [ValueError("too small"), ExceptionGroup("inner", [MemoryError()])]), ""
    ),
}  # fmt: skip
RETURNED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], Check | None, str]] = {
    "Sparse": (
        lambda output, lse: (output.to_sparse(), lse),
        Check.SHAPE, "expected a strided torch.Tensor as output, got a tensor of layout sparse_coo",
    ),
    "Nested": (
        lambda output, lse: (torch.nested.nested_tensor(list(output)), lse), Check.SHAPE, "got a nested tensor"
    ),
    "Fake": (lambda output, lse: (FakeTensorMode().from_tensor(output), lse), Check.SHAPE, "got a FakeTensor"),
    "Subclass": (lambda output, lse: (output.as_subclass(Refusing), lse), Check.SHAPE, "got a Refusing"),
    "Quantized": (
        lambda output, lse: (torch.quantize_per_tensor(output.float(), 0.1, 0, torch.qint8), lse),
        Check.SHAPE, "got a quantized tensor",
    ),
    "Freed": (freed, Check.SHAPE, "got a tensor whose storage holds 0 bytes of "),
    "Negated": (lambda output, lse: (torch._neg_view(-output), lse), Check.SHAPE, "got a lazily negated tensor"),
    "Meta": (lambda output, lse: (output.to("meta"), lse), Check.DEVICE, "expected output on cpu, got meta"),
    "Dictionary": (
        lambda output, lse: {"output": output, "lse": lse}, Check.SHAPE, "expected 2 tensor(s), got (dict)"
    ),
    "Generator": (
        lambda output, lse: (tensor for tensor in (output, lse)), Check.SHAPE, "expected 2 tensor(s), got (generator)"
    ),
    "Text": (lambda output, lse: ("output", lse), Check.SHAPE, "expected 2 tensor(s), got (str, Tensor)"),
    "Scalar": (
        lambda output, lse: (output.sum(), lse), Check.SHAPE, "expected output of shape [8, 4, 16], got []"
    ),
    "Overrides": (overridden, Check.OUTPUT, "output is 0 at "),
    "Pair": (lambda output, lse: OddPair((output, lse)), None, ""),
    "List": (lambda output, lse: [output, lse], None, ""),
    "Learns": (lambda output, lse: (output.requires_grad_(), lse.requires_grad_()), None, ""),
}  # fmt: skip
"""What is returned, and by which check it fails; the last ones are right."""
DISTURBS = {name: disturb for name, (disturb, _) in LEFT.items()}
DISTURBS |= {name: partial(raised, error) for name, (error, _) in RAISED.items()}
for name, disturb in DISTURBS.items():
    globals()[name] = type(name, (Hostile,), {"disturb": staticmethod(disturb)})
for name, (returned, *_) in RETURNED.items():
    globals()[name] = type(name, (Hostile,), {"returned": staticmethod(returned)})
OTHERWISE = {name: (Check.CALL, said) for name, (_, said) in RAISED.items() if said}
OTHERWISE |= {name: (check, said) for name, (_, check, said) in RETURNED.items() if check}
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
        *(np.asarray, dict(vars(builtins)), torch.get_default_dtype(), torch.initial_seed(), Path.cwd()),
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
    assert LEFT[name][1] in record.message


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


@pytest.mark.parametrize("name", [name for name, (_, check, _) in RETURNED.items() if not check])
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
