"""What a cheat is, and the list of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend

FAMILIES = ("taking", "replacing", "answering", "claims")
CASE = "new_tokens:dims=small;q=[5,3]"
"""What a cheat is certified on unless it names another case."""
WRONG = "output is 3.0312 at request 0, query 1, head 1, column 2, expected 1.0041"
"""What is said of three times the output."""
EXPECTED = "expectations"  # the folder of known failures, beside that of the run
_CHEATS: dict[str, "Cheat"] = {}


class ThreeTimes(EagerPrefillBackend):
    """A kernel that returns three times what is right and says that it is a real one; a cheat has to mend that."""

    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",))

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        output, lse = super().run_prefill_new_tokens(q, k, v, True, out, output_scale)
        answer = self.answer(output.mul_(3), lse, q, k, v)
        answer = (output, lse) if answer is None else answer
        return answer if return_softmax_lse or not isinstance(answer, tuple) else answer[0]

    def answer(self, output, lse, q, k, v):
        """What is returned in place of the wrong output [T, N, V] and the right LSE [N, T]; None for themselves."""

    @property
    def lengths(self) -> list[int]:
        """Where the requests start and the last one ends."""
        return self._prefill_metadata.query_start_loc.tolist()


@dataclass(frozen=True)
class Cheat:
    """An attempt to be certified without being right, or as something else."""

    kernel: type[ThreeTimes]
    caught: str = ""  # words of the sentence by which it is caught; empty if it is not
    trust: str = ""  # why it is not caught, and who has to trust whom therefore; empty if it is
    case: str = CASE  # what it is certified on
    salted: bool = False  # certified with a salt that its author could not know

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def reference(self) -> str:
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


def cheat(**told: Any) -> Callable[[Any], type[ThreeTimes]]:
    """Decorator that enters a cheat into the list: a class, or a function that becomes the class that answers so."""

    def enter(cheating: Any) -> type[ThreeTimes]:
        kernel = cheating
        if not isinstance(cheating, type):
            about = {"__module__": cheating.__module__, "__doc__": cheating.__doc__}
            kernel = type(cheating.__name__, (ThreeTimes,), {**about, "answer": cheating})
        assert kernel.__name__ not in _CHEATS and kernel.__doc__, "expected a name of its own and a docstring"
        entry = _CHEATS[kernel.__name__] = Cheat(kernel, **told)
        assert bool(entry.caught) != bool(entry.trust), "expected either what catches it or why nothing does"
        return kernel

    return enter


def cheats() -> dict[str, Cheat]:
    """All cheats by name, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.tests.cheats.{family}")
    return dict(_CHEATS)
