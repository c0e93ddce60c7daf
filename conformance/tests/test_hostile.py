"""What a kernel leaves behind, raises or returns is its own failure, and no later case's."""

import builtins
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving import system_settings
from mla_conformance.driving.executor import ProcessState, run_step
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

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
PARTS = ("Interrupts", "Subclass", "Freed", "Dictionary", "Overrides")
"""Those that are judged of a part of a call as well, one of each kind."""
NEW_TOKENS = "new_tokens:dims=small;q=[5,3]"
CONTEXT = Context()
CHUNKED = "chunked_context:dims=small;q=[5,3];kv=[40,3];workspace=32"


def judged(name: str, case: str = NEW_TOKENS) -> Record:
    subject = Subject.of(f"{Path(__file__).with_name('hostile.py')}:{name}", torch.device("cpu"))
    return judge_one(subject, Case.parse(case), CONTEXT)


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
    monkeypatch.setattr(system_settings, "_PATIENCE", 0.0)  # what it leaves does not end by itself
    before = process()
    record = judged(name)
    assert process() == before
    assert (record.status, record.check) == (Status.FAIL, Check.PROCESS_STATE), record.message
    assert LEFT[name] in record.message


@pytest.mark.parametrize(
    ("name", "case"), [*((name, NEW_TOKENS) for name in OTHERWISE), *((name, CHUNKED) for name in PARTS)]
)
def test_what_is_raised_or_returned_is_a_failure_of_the_call(name: str, case: str) -> None:
    check, said = OTHERWISE[name]
    record = judged(name, case)
    assert (record.status, record.check) == (Status.FAIL, check), record.message
    assert said in record.message


@pytest.mark.parametrize("name", ["Pair", "List", "Learns"])
def test_a_right_result_stays_right(name: str) -> None:
    assert judged(name).status is Status.PASS


def test_memory_that_ran_out_in_a_group_is_unavailable() -> None:
    assert judged("RunsOutInAGroup").status is Status.UNAVAILABLE


def test_a_mode_that_the_first_call_leaves_does_not_meet_the_second() -> None:
    assert judged("LeavesAFunctionMode", CHUNKED).check == Check.PROCESS_STATE


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
    with ProcessState.watched() as changes:
        torch.Tensor.of_a_library = lambda self: self  # type: ignore[attr-defined]
        os.environ["OF_A_LIBRARY"] = "1"
        torch.set_float32_matmul_precision("high")
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed = torch._disable_dynamo(seed)  # as torch's compiler does when it is imported
    torch.manual_seed = seed
    del torch.Tensor.of_a_library, os.environ["OF_A_LIBRARY"]  # type: ignore[attr-defined]
    assert changes == []
