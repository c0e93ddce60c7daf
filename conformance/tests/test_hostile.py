"""What a kernel leaves behind, raises or returns is its own failure, and no later case's."""

import builtins
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from resource import RLIMIT_FSIZE as FILES
from resource import getrlimit, setrlimit
from subprocess import Popen
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.driving import settings
from mla_conformance.driving.driver import run_step
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.tests.drawn import changed, judged

setattr_, matmul, quantized = setattr, torch.backends.cuda.matmul, torch.quantize_per_tensor
kept: list[object] = []
"""What would end if nobody held it."""


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("nothing may be called")


RefusesEverything: Any = type("RefusesEverything", (TorchFunctionMode,), {"__torch_function__": refuse})
DispatchesNothing: Any = type("DispatchesNothing", (TorchDispatchMode,), {"__torch_dispatch__": refuse})
Refusing: Any = type("Refusing", (torch.Tensor,), {"__torch_function__": classmethod(refuse)})
# A pair that counts, and tells its items, wrongly.
OddPair: Any = type("OddPair", (tuple,), {"__iter__": refuse, "__len__": lambda self: 7, "__getitem__": refuse})


class Own(BaseException):
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


def freed(output: torch.Tensor, lse: torch.Tensor) -> Any:
    output.untyped_storage().resize_(0)
    return output, lse


def overridden(output: torch.Tensor, lse: torch.Tensor) -> Any:
    wrong = torch.zeros_like(output)
    wrong.double = output.double  # type: ignore[method-assign]
    return wrong, lse


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "LeavesAutocastOn": (lambda: entered(torch.autocast("cpu")), "autocast on cpu from (False, torch.bfloat16) to (T"),
    "LeavesInferenceModeOn": (lambda: entered(torch.inference_mode()), "inference mode from False to True"),
    "LeavesAFunctionMode": (lambda: entered(RefusesEverything()), "function modes from [] to ['RefusesEverything']"),
    "LeavesADispatchMode": (lambda: entered(DispatchesNothing()), "dispatch modes from [] to ['DispatchesNothing']"),
    "LeavesADevice": (lambda: entered(torch.device("meta")), "default device from cpu to meta"),
    "HidesAMethod": (lambda: setattr(torch.Tensor, "exp", lambda self: self), "torch.Tensor.exp was replaced"),
    "ReplacesAFunction": (lambda: setattr(torch, "exp", torch.zeros_like), "torch.exp was replaced"),
    "RemovesAFunction": (lambda: delattr(torch.nn.functional, "softmax"), "torch.nn.functional.softmax was"),
    "ReplacesNumpy": (lambda: setattr(np, "asarray", np.zeros_like), "numpy.asarray was replaced"),
    "ReplacesTheInterpreters": (replace_the_interpreters, "builtins.len was replaced"),
    "MultipliesRoughly": (lambda: torch.set_float32_matmul_precision("medium"), "matmul precision from highest to med"),
    "AllowsTF32": (lambda: setattr(matmul, "fp32_precision", "tf32"), "precision of CUDA's matmul from ieee to tf32"),
    "ForbidsTF32OfCudnn": (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "TF32 of cuDNN from True to"),
    "ChangesDtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype from torch.float32 to torch.flo"),
    "ChangesDirectory": (lambda: os.chdir("/"), "working directory from"),
    "Seeds": (lambda: torch.manual_seed(12345), "seed from"),
    "ChangesThreads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads from "),
    "FlushesDenormals": (lambda: torch.set_flush_denormal(True), "control (rounding, denormals) from 0x1f80 to 0x9fc0"),
    "FiltersWarnings": (lambda: warnings.filterwarnings("error", message="hostile"), "warning filters from "),
    "HandlesASignal": (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), "handler of SIGUSR2 from 0 to 1"),
    "SetsAnAlarm": (lambda: signal.alarm(3600), "timer ITIMER_REAL from off to running"),
    "LimitsFiles": (lambda: setrlimit(FILES, (10**6, getrlimit(FILES)[1])), "resource limit RLIMIT_FSIZE from "),
    "LeavesAChild": (lambda: kept.append(Popen(["sleep", "600"], start_new_session=True)), "left 1 child process runn"),
    "ChangesTheMask": (lambda: os.umask(0o7), "umask from "),
}  # fmt: skip
RAISED: dict[str, tuple[BaseException | type[BaseException], str]] = {
    "Exits": (SystemExit(0), "the call raised SystemExit: 0"),
    "Interrupts": (KeyboardInterrupt, "the call raised KeyboardInterrupt"),
    "Generates": (GeneratorExit, "the call raised GeneratorExit"),
    "RaisesItsOwn": (Own, "the call raised Own: (its text cannot be made)"),
    "RaisesAGroup": (BaseExceptionGroup("several", [KeyboardInterrupt()]), "the call raised BaseExceptionGroup: s"),
    "RunsOutInAGroup": (ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [MemoryError()])]), ""),
}  # fmt: skip
RETURNED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], Check | None, str]] = {
    "Sparse": (lambda o, lse: (o.to_sparse(), lse), Check.SHAPE, "strided torch.Tensor as output, got a tensor of lay"),
    "Nested": (lambda o, lse: (torch.nested.nested_tensor(list(o)), lse), Check.SHAPE, "got a nested tensor"),
    "Subclass": (lambda o, lse: (o.as_subclass(Refusing), lse), Check.SHAPE, "got a Refusing"),
    "Quantized": (lambda o, lse: (quantized(o.float(), 0.1, 0, torch.qint8), lse), Check.SHAPE, "got a quantized"),
    "Freed": (freed, Check.SHAPE, "got a tensor whose storage holds 0 bytes of "),
    "Negated": (lambda o, lse: (torch._neg_view(-o), lse), Check.SHAPE, "got a lazily negated tensor"),
    "Meta": (lambda o, lse: (o.to("meta"), lse), Check.DEVICE, "expected output on cpu, got meta"),
    "Dictionary": (lambda o, lse: {"output": o, "lse": lse}, Check.SHAPE, "expected 2 tensor(s), got (dict)"),
    "Generator": (lambda o, lse: (x for x in (o, lse)), Check.SHAPE, "expected 2 tensor(s), got (generator)"),
    "Text": (lambda o, lse: ("output", lse), Check.SHAPE, "expected 2 tensor(s), got (str, Tensor)"),
    "Scalar": (lambda o, lse: (o.sum(), lse), Check.SHAPE, "expected output of shape [8, 4, 16], got []"),
    "Overrides": (overridden, Check.OUTPUT, "output is 0 at "),
    "Pair": (lambda o, lse: OddPair((o, lse)), None, ""),
    "List": (lambda o, lse: [o, lse], None, ""),
    "Learns": (lambda o, lse: (o.requires_grad_(), lse.requires_grad_()), None, ""),
}  # fmt: skip
"""What is returned, and by which check it fails; the last ones are right."""
OTHERWISE: dict[str, tuple[Check | None, str]]
OTHERWISE = {name: (Check.CALL, said) for name, (_, said) in RAISED.items() if said}
OTHERWISE |= {name: (check, said) for name, (_, check, said) in RETURNED.items()}
NEW_TOKENS = "new_tokens:dims=small;q=[5,3]"
CHUNKED = "chunked_context:dims=small;q=[5,3];kv=[40,3];workspace=32"


def judged_of(name: str, case: str = NEW_TOKENS) -> Record:
    def run(honest: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        output, lse = honest(*operands, **options)
        if name in LEFT:
            LEFT[name][0]()
        if name in RAISED:
            raise RAISED[name][0]
        return RETURNED[name][0](output, lse) if name in RETURNED else (output, lse)

    return judged(changed(EagerPrefillBackend, run_prefill_new_tokens=run), case)


def process() -> list[Any]:
    """What the hostile backends change, read in another way than the driver does where there is one."""
    mask = os.umask(0)
    os.umask(mask)
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return [
        *(torch.is_autocast_enabled(), torch.is_inference_mode_enabled(), torch.zeros(1).device, children, mask),
        *(torch.ones(1).exp(), torch.exp(torch.ones(1)), torch.nn.functional.softmax),
        *(np.asarray, dict(vars(builtins)), torch.get_default_dtype(), torch.initial_seed(), Path.cwd()),
        *(torch.get_float32_matmul_precision(), matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        *(torch.get_num_threads(), torch.tensor(1e-40) * 1.0, list(warnings.filters), signal.getsignal(signal.SIGUSR2)),
        *(signal.getitimer(signal.ITIMER_REAL), getrlimit(FILES)),
    ]


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_charged_and_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_PATIENCE", 0.0)  # what it leaves does not end by itself
    before = process()
    record = judged_of(name)
    assert process() == before
    assert (record.status, record.check) == (Status.FAIL, Check.PROCESS_STATE), record.message
    assert LEFT[name][1] in record.message


# Those without which there is nothing to merge, each for a reason of its own.
OF_CHUNKS = [(name, CHUNKED) for name in ("Interrupts", "Sparse", "Meta", "Dictionary", "Scalar")]


@pytest.mark.parametrize(("name", "case"), [*((name, NEW_TOKENS) for name in OTHERWISE), *OF_CHUNKS])
def test_what_is_raised_or_returned_is_a_failure_of_the_call_unless_it_is_right(name: str, case: str) -> None:
    check, said = OTHERWISE[name]
    record = judged_of(name, case)
    expected = (Status.FAIL, check) if check else (Status.PASS, "")
    assert (record.status, record.check) == expected and said in record.message, record.message


def test_memory_may_run_out_in_a_group_and_a_mode_that_the_first_call_leaves_does_not_meet_the_second() -> None:
    assert judged_of("RunsOutInAGroup").status is Status.UNAVAILABLE
    assert judged_of("LeavesAFunctionMode", CHUNKED).check == Check.PROCESS_STATE


def test_an_interrupt_from_outside_is_no_failure_of_the_call() -> None:
    # They may be ignored here, as in what a script has started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_step(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


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
