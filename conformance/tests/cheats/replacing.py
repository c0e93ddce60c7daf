"""What judges replaced, results that come late, and objects that answer as if they were right."""

import ctypes
import gc
import os
import sys
import time
from threading import Thread, get_ident

import msgspec
import torch

from mla_conformance.engine import messages
from mla_conformance.judging import judge
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.judging.record import Record, Status, Verdict
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.roles import definition
from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.taking import stack_of
from mla_conformance.trials import trial
from mla_conformance.trials.trial import Trial


@cheat(caught=WRONG)
def ReplacesTheJudge(kernel, output, lse, q, k, v):
    """Puts a judge that passes everything in the judge's place, wherever that was imported."""
    definition.judge = trial.judge = lambda *_: Verdict(Status.PASS)


@cheat(caught=WRONG)
def RewritesTheJudge(kernel, output, lse, q, k, v):
    """Leaves the judge's functions in their places and gives one of them other code."""
    judge.AttentionJudge._output.__code__ = (lambda kernel, part, found: None).__code__


@cheat(caught=WRONG)
def ReplacesTheJudgeLater(kernel, output, lse, q, k, v):
    """Leaves a thread behind that replaces the judge when what the call left behind has been looked at."""
    caller = get_ident()

    def replace_when_judged() -> None:
        while all(frame.f_code is not trial.Trial.judged.__code__ for frame in stack_of(caller)):
            time.sleep(0)
        judge.AttentionJudge._output = lambda *_: None  # type: ignore[method-assign]

    sys.setswitchinterval(1e-6)
    Thread(target=replace_when_judged, daemon=True).start()


@cheat(caught=WRONG)
def ReplacesTheRecord(kernel, output, lse, q, k, v):
    """Makes records that hold a pass, whatever the verdict is."""
    honest = Record.with_verdict
    Record.with_verdict = lambda record, verdict, seconds: honest(record, Verdict(Status.PASS), seconds)


@cheat(caught=WRONG)
def ReplacesTheMessages(kernel, output, lse, q, k, v):
    """Lets its process report a pass, whatever the record holds."""

    def passing(message):
        if isinstance(message, messages.TaskReply) and message.record:
            passed = message.record.with_fields(status=Status.PASS, message="", check="", clause="")
            message = msgspec.structs.replace(message, record=passed)
        return honest(message)

    honest, messages.encode = messages.encode, passing


@cheat(caught=WRONG)
def ReplacesOperators(kernel, output, lse, q, k, v):
    """Makes every difference and every comparison of tensors find that they agree."""
    torch.equal = torch.allclose = lambda *_, **__: True
    torch.Tensor.__sub__ = lambda x, y: torch.zeros(torch.broadcast_shapes(x.shape, y.shape), dtype=x.dtype)


@cheat(caught=WRONG)
def WidensTheTolerance(kernel, output, lse, q, k, v):
    """Writes larger limits into the table of tolerances that is in memory."""
    for limit in ("element_limit", "row_deviations"):
        object.__setattr__(tolerance(), limit, 1e9)


@cheat(caught=WRONG)
def ReplacesTheGoldenResult(kernel, output, lse, q, k, v):
    """Writes its own output over the golden one."""
    for expectation in [x for x in gc.get_objects() if isinstance(x, GoldenAttention)]:
        expectation.calls[0].output.copy_(output)


@cheat(caught=WRONG)
def ChangesTheQuestion(kernel, output, lse, q, k, v):
    """Writes three times the values into what it was given, so that three times the output is right."""
    v.mul_(3)


@cheat(caught=WRONG)
def FillsInWhenJudged(kernel, output, lse, q, k, v):
    """Returns a view that a profiler, which it leaves behind, fills with the golden values when the judge is called."""

    def fill(frame, *_):
        if frame.f_code is Trial.judged.__code__:
            sys.setprofile(None)
            output.copy_(frame.f_locals["expectation"].calls[0].output)

    sys.setprofile(fill)


@cheat(
    case="out_tensor:dims=small;q=[5,3];out=1",
    trust="The numbers were looked at before; the write meets memory of the kernel's own process that nothing reads "
    "any more.",
)
class WritesAroundItsOutputLater(ThreeTimes):
    """Returns what is right in the output that it was given, and writes around that when it is asked for evidence."""

    def answer(self, output, lse, q, k, v):
        self.storage = output.untyped_storage()
        output.div_(3)

    def kernel_evidence(self):
        for place in (self.storage.data_ptr(), self.storage.data_ptr() + self.storage.nbytes() - 8):
            ctypes.memset(place, 0, 8)
        return {}


class Agreeing(torch.Tensor):
    """Compares equal to anything, and differs by nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [x.as_subclass(torch.Tensor) if isinstance(x, Agreeing) else x for x in args]
        result = func(*plain, **(kwargs or {}))
        if func in (torch.Tensor.double, torch.Tensor.__getitem__):
            return result.as_subclass(Agreeing)
        return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result


@cheat(caught="got a Agreeing")
def ReturnsASubclass(kernel, output, lse, q, k, v):
    """Returns a tensor of its own class that differs from nothing."""
    return output.as_subclass(Agreeing), lse


@cheat(caught=WRONG)
def HangsMethodsOnItsOutput(kernel, output, lse, q, k, v):
    """Returns a plain tensor with methods of its own, by which whoever compares it gets the golden values."""

    def double():
        golden = [frame.f_locals["part"].golden for frame in stack_of(get_ident()) if "part" in frame.f_locals]
        return golden[0].output if golden else torch.Tensor.double(output)

    output.double, output.detach, output.contiguous = double, lambda: output, lambda: output


class Posing:
    """No tensor, but whoever asks for its class is told that it is."""

    __class__ = torch.Tensor  # type: ignore[assignment]

    def __init__(self, behind):
        self.behind = behind

    def __getattr__(self, name):
        return getattr(self.behind, name)


@cheat(caught="got (Posing, Tensor)")
def PosesAsATensor(kernel, output, lse, q, k, v):
    """Returns an object that says that its class is that of tensors."""
    return Posing(output), lse


class Surprise(tuple):
    """A pair that, where it is unpickled, runs what it wants."""

    def __reduce__(self):
        return os._exit, (0,)


@cheat(caught=WRONG)
def SendsCode(kernel, output, lse, q, k, v):
    """Returns a pair that runs code of its own in any process that unpickles it."""
    return Surprise((output, lse))
