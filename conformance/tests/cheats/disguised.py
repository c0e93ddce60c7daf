"""Objects that are no tensors, and answer as if they were right."""

import os
from threading import get_ident

import torch

from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.searching import stack_of


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
class ReturnsASubclass(ThreeTimes):
    """Returns a tensor of its own class that differs from nothing."""

    def answer(self, output, lse, q, k, v):
        return output.as_subclass(Agreeing), lse


@cheat(caught=WRONG)
class HangsMethodsOnItsOutput(ThreeTimes):
    """Returns a plain tensor with methods of its own, by which whoever compares it gets the golden values."""

    def answer(self, output, lse, q, k, v):
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
class PosesAsATensor(ThreeTimes):
    """Returns an object that says that its class is that of tensors."""

    def answer(self, output, lse, q, k, v):
        return Posing(output), lse


class Surprise(tuple):
    """A pair that, where it is unpickled, runs what it wants."""

    def __reduce__(self):
        return os._exit, (0,)


@cheat(caught=WRONG)
class SendsCode(ThreeTimes):
    """Returns a pair that runs code of its own in any process that unpickles it."""

    def answer(self, output, lse, q, k, v):
        return Surprise((output, lse))
