"""Results that are there later than the call says, and writes after the checks."""

import ctypes
import sys

from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat
from mla_conformance.trials.trial import Trial


@cheat(claims="that found numbers are computed", caught=WRONG)
class FillsInWhenJudged(ThreeTimes):
    """Returns a view that a profiler, which it leaves behind, fills with the golden values when the judge is called."""

    def answer(self, output, lse, q, k, v):
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
