"""What stands around a call: its form, its arguments, Python itself, and whether anybody looks."""

import builtins
import sys

from mla_conformance.driving import remote
from mla_conformance.driving.remote import Reply
from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat

_TUPLE = "expected the output itself, got a tuple of 1"
_GRADIENT = "requires_grad of q of new tokens was False, is True"
_METADATA = "metadata.query_start_loc was replaced"
_ROOM = "no room for a result of"


@cheat(case="new_tokens:dims=small;q=[5,3];lse=0", claims="that it has the interface", caught=_TUPLE)
class ReturnsATuple(ThreeTimes):
    """Returns what is right in a tuple, where the tensor itself is due."""

    def run_prefill_new_tokens(self, *arguments, **options):
        return (super().run_prefill_new_tokens(*arguments, **options),)

    def answer(self, output, lse, q, k, v):
        return output.div_(3), lse


@cheat(caught=WRONG)
class ReplacesPythonsFunctions(ThreeTimes):
    """Makes Python's own functions find that everything agrees, and that nothing was replaced."""

    def answer(self, output, lse, q, k, v):
        replaced = {"bool": lambda *_: False, "max": lambda *_, **__: 0.0, "len": lambda _: 0, "any": lambda _: False}
        vars(builtins).update(replaced)
        return output, lse


@cheat(caught=_ROOM)
class ForgesItsNeeds(ThreeTimes):
    """Says, where its process tells what it returned, that this needs more memory than there is."""

    def answer(self, output, lse, q, k, v):
        forged = lambda shared, rooms, reached, number, value: Reply(number, needs={"cpu": 2**47})  # noqa: E731
        remote.written.__code__ = forged.__code__
        return output, lse


@cheat(claims="that it leaves its inputs as they are", caught=_GRADIENT)
class MakesItsInputsLearn(ThreeTimes):
    """Returns what is right, and leaves its queries requiring gradients."""

    def answer(self, output, lse, q, k, v):
        q.requires_grad_()
        return output.div_(3), lse


@cheat(claims="that it leaves its metadata as it is", caught=_METADATA)
class ReplacesItsMetadata(ThreeTimes):
    """Returns what is right, and puts a tensor of its own into the metadata."""

    def answer(self, output, lse, q, k, v):
        self._prefill_metadata.query_start_loc = self._prefill_metadata.query_start_loc.clone()
        return output.div_(3), lse


@cheat(
    claims="that it is right wherever it runs",
    trust="A kernel can see that the harness is loaded, and be right only then; whoever trusts it reads the source "
    "that the certificate pins.",
)
class IsRightWhereItIsJudged(ThreeTimes):
    """Is right only while the harness is loaded."""

    def answer(self, output, lse, q, k, v):
        return (output.div_(3) if "mla_conformance.driving" in sys.modules else output), lse
