"""Declarations that are not true, and what stands around a call: its form, its arguments, Python, and who looks."""

import builtins
import sys
from importlib.metadata import Distribution
from typing import ClassVar

from mla_conformance.backends.declaration import Declaration
from mla_conformance.driving import remote
from mla_conformance.driving.remote import Reply
from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.taking import NUMBERS_ARE_RIGHT


@cheat(trust=NUMBERS_ARE_RIGHT)
def ClaimsToBeReal(kernel, output, lse, q, k, v):
    """Computes with plain tensor operations and declares that it is no emulation."""
    output.div_(3)


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
        output.div_(3)


@cheat(caught="did not pass: core: unsupported", case="new_tokens:q=[1];data=needle;lse=0")
class DeclaresNothing(ThreeTimes):
    """Declares everything unsupported, so that nothing of it can fail."""

    @classmethod
    def validate_configuration(cls, *_):
        return ["not declared"]


@cheat(case="new_tokens:dims=small;q=[5,3];lse=0", caught="expected the output itself, got a tuple of 1")
class ReturnsATuple(ThreeTimes):
    """Returns what is right in a tuple, where the tensor itself is due."""

    def run_prefill_new_tokens(self, *arguments, **options):
        return (super().run_prefill_new_tokens(*arguments, **options),)

    def answer(self, output, lse, q, k, v):
        output.div_(3)


@cheat(caught=WRONG)
def ReplacesPythonsFunctions(kernel, output, lse, q, k, v):
    """Makes Python's own functions find that everything agrees, and that nothing was replaced."""
    replaced = {"bool": lambda *_: False, "max": lambda *_, **__: 0.0, "len": lambda _: 0, "any": lambda _: False}
    vars(builtins).update(replaced)


@cheat(caught="no room for a result of")
def ForgesItsNeeds(kernel, output, lse, q, k, v):
    """Says, where its process tells what it returned, that this needs more memory than there is."""
    forged = lambda shared, rooms, reached, number, value: Reply(number, needs={"cpu": 2**47})  # noqa: E731
    remote.written.__code__ = forged.__code__


@cheat(caught="requires_grad of q of new tokens was False, is True")
def MakesItsInputsLearn(kernel, output, lse, q, k, v):
    """Returns what is right, and leaves its queries requiring gradients."""
    q.requires_grad_()
    output.div_(3)


@cheat(caught="metadata.query_start_loc was replaced")
def ReplacesItsMetadata(kernel, output, lse, q, k, v):
    """Returns what is right, and puts a tensor of its own into the metadata."""
    kernel._prefill_metadata.query_start_loc = kernel._prefill_metadata.query_start_loc.clone()
    output.div_(3)


@cheat(
    trust="A kernel can see that the harness is loaded, and be right only then; whoever trusts it reads the source "
    "that the certificate pins.",
)
def IsRightWhereItIsJudged(kernel, output, lse, q, k, v):
    """Is right only while the harness is loaded."""
    return (output.div_(3) if "mla_conformance.driving" in sys.modules else output), lse
