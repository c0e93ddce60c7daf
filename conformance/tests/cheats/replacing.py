"""What judges replaced, results that come late or pose as others, and declarations that are not true."""

import builtins
import ctypes
import gc
import os
import sys
import time
from importlib.metadata import Distribution
from threading import Thread, get_ident
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.driving import remote
from mla_conformance.driving.remote import Reply
from mla_conformance.judging import judge
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.tests.cheats import WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.taking import NUMBERS_ARE_RIGHT, stack_of
from mla_conformance.trials import trial
from mla_conformance.trials.trial import Trial


@cheat(caught=WRONG)
def RewritesTheJudge(kernel, output, lse, q, k, v):
    """Leaves the judge's functions in their places and gives one of them other code."""
    judge.AttentionJudge._output.__code__ = (lambda kernel, part, found: None).__code__
    return output, lse


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
    return output, lse


@cheat(caught=WRONG)
def ReplacesOperators(kernel, output, lse, q, k, v):
    """Makes every difference and every comparison of tensors find that they agree."""
    torch.equal = torch.allclose = lambda *_, **__: True
    torch.Tensor.__sub__ = lambda x, y: torch.zeros(torch.broadcast_shapes(x.shape, y.shape), dtype=x.dtype)
    return output, lse


@cheat(caught=WRONG)
def ReplacesTheGoldenResult(kernel, output, lse, q, k, v):
    """Writes its own output over the golden one."""
    for expectation in [x for x in gc.get_objects() if isinstance(x, GoldenAttention)]:
        expectation.calls[0].output.copy_(output)
    return output, lse


@cheat(caught=WRONG)
def ChangesTheQuestion(kernel, output, lse, q, k, v):
    """Writes three times the values into what it was given, so that three times the output is right."""
    v.mul_(3)
    return output, lse


@cheat(claims="that found numbers are computed", caught=WRONG)
def FillsInWhenJudged(kernel, output, lse, q, k, v):
    """Returns a view that a profiler, which it leaves behind, fills with the golden values when the judge is called."""

    def fill(frame, *_):
        if frame.f_code is Trial.judged.__code__:
            sys.setprofile(None)
            output.copy_(frame.f_locals["expectation"].calls[0].output)

    sys.setprofile(fill)
    return output, lse


@cheat(
    claims="that it writes to its output only",
    case="out_tensor:dims=small;q=[5,3];out=1",
    trust="The numbers were looked at before; the write meets memory of the kernel's own process that nothing reads "
    "any more.",
)
class WritesAroundItsOutputLater(ThreeTimes):
    """Returns what is right in the output that it was given, and writes around that when it is asked for evidence."""

    def answer(self, output, lse, q, k, v):
        self.storage = output.untyped_storage()
        return output.div_(3), lse

    def kernel_evidence(self):
        for place in (self.storage.data_ptr(), self.storage.data_ptr() + self.storage.nbytes() - 8):
            ctypes.memset(place, 0, 8)
        return {}


@cheat(caught=WRONG)
def HangsMethodsOnItsOutput(kernel, output, lse, q, k, v):
    """Returns a plain tensor with methods of its own, by which whoever compares it gets the golden values."""

    def double():
        golden = [frame.f_locals["part"].golden for frame in stack_of(get_ident()) if "part" in frame.f_locals]
        return golden[0].output if golden else torch.Tensor.double(output)

    output.double, output.detach, output.contiguous = double, lambda: output, lambda: output
    return output, lse


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


@cheat(claims="that an emulation is a real kernel", trust=NUMBERS_ARE_RIGHT)
def ClaimsToBeReal(kernel, output, lse, q, k, v):
    """Computes with plain tensor operations and declares that it is no emulation."""
    return output.div_(3), lse


class _FlashAttention(Distribution):
    """What is told of a package that is not there."""

    def read_text(self, filename):
        return "Name: flash-attn\nVersion: 2.9.9\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Finder:
    """Finds it, and nothing else."""

    @staticmethod
    def find_spec(*_):
        return None

    @staticmethod
    def find_distributions(context):
        return [_FlashAttention()] if context.name == "flash-attn" else []


@cheat(
    claims="that it drives a library, in a version",
    trust="A version is what an installed package says of itself. On a GPU the record lists kernels and libraries that "
    "were loaded, here none of that library's.",
)
class ClaimsALibrary(ThreeTimes):
    """Declares a distribution that it does not use, and brings the metadata of one that is not installed."""

    declaration: ClassVar[Declaration] = Declaration(distributions=("flash-attn",))

    @classmethod
    def is_available(cls):
        if _Finder not in sys.meta_path:
            sys.meta_path.append(_Finder)
        return True

    def answer(self, output, lse, q, k, v):
        return output.div_(3), lse


@cheat(
    claims="that what it cannot do is not asked of it",
    caught="did not pass: core: unsupported",
    case="new_tokens:q=[1];data=needle;lse=0",
)
class DeclaresNothing(ThreeTimes):
    """Declares everything unsupported, so that nothing of it can fail."""

    @classmethod
    def validate_configuration(cls, *_):
        return ["not declared"]


@cheat(caught=WRONG)
def ReplacesPythonsFunctions(kernel, output, lse, q, k, v):
    """Makes Python's own functions find that everything agrees, and that nothing was replaced."""
    replaced = {"bool": lambda *_: False, "max": lambda *_, **__: 0.0, "len": lambda _: 0, "any": lambda _: False}
    vars(builtins).update(replaced)
    return output, lse


@cheat(caught="no room for a result of")
def ForgesItsNeeds(kernel, output, lse, q, k, v):
    """Says, where its process tells what it returned, that this needs more memory than there is."""
    forged = lambda shared, rooms, reached, number, value: Reply(number, needs={"cpu": 2**47})  # noqa: E731
    remote.written.__code__ = forged.__code__
    return output, lse


@cheat(
    claims="that it is right wherever it runs",
    trust="A kernel can see that the harness is loaded, and be right only then; whoever trusts it reads the source "
    "that the certificate pins.",
)
def IsRightWhereItIsJudged(kernel, output, lse, q, k, v):
    """Is right only while the harness is loaded."""
    return (output.div_(3) if "mla_conformance.driving" in sys.modules else output), lse
