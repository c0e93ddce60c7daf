"""What a cheat is, and the list of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend

FAMILIES = ("borrowed", "searching", "replacing", "late", "disguised", "remembering", "answering", "claims", "around")
CASE = "new_tokens:dims=small;q=[5,3]"
"""What a cheat is certified on unless it names another case."""
WRONG = "output is 3.0312 at request 0, query 1, head 1, column 2, expected 1.0041"
"""What is said of three times the output."""
EXPECTED = "expectations"
"""The folder of known failures, beside that of the run."""
_CHEATS: dict[str, "Cheat"] = {}


class ThreeTimes(EagerPrefillBackend):
    """A kernel that returns three times what is right and says that it is a real one; a cheat has to mend that.

    A cheat overrides :meth:`answer`, which makes of the wrong result what is returned.
    """

    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",))

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Three times the output, and what the cheat does about it."""
        output, lse = super().run_prefill_new_tokens(q, k, v, True, out, output_scale)
        answer = self.answer(output.mul_(3), lse, q, k, v)
        return answer if return_softmax_lse or not isinstance(answer, tuple) else answer[0]

    def answer(self, output: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """What is returned in place of the wrong output [T, N, V] and the right LSE [N, T]."""
        return output, lse

    @property
    def lengths(self) -> list[int]:
        """Where the requests start and the last one ends."""
        return self._prefill_metadata.query_start_loc.tolist()


class CheatError(ValueError):
    """A cheat that is declared wrongly."""


@dataclass(frozen=True)
class Cheat:
    """An attempt to be certified without being right, or as something else.

    Attributes:
        kernel: the cheat.
        claims: what a reader is to believe.
        caught: words of the sentence by which it is caught; empty if it is not.
        trust: why it is not caught, and who has to trust whom therefore; empty if it is.
        case: what it is certified on.
        salted: it is certified with a salt that its author could not know.
    """

    kernel: type[ThreeTimes]
    claims: str
    caught: str
    trust: str
    case: str
    salted: bool

    @property
    def name(self) -> str:
        """Its name in the table."""
        return self.kernel.__name__

    @property
    def attempt(self) -> str:
        """What it attempts, in one sentence."""
        return (self.kernel.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    @property
    def reference(self) -> str:
        """What ``certify --backend`` takes."""
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


Kernel = TypeVar("Kernel", bound=type[ThreeTimes])
RIGHT = "that three times the right output is right"


def cheat(
    *, claims: str = RIGHT, caught: str = "", trust: str = "", case: str = CASE, salted: bool = False
) -> Callable[[Kernel], Kernel]:
    """Class decorator that enters a cheat into the list.

    Raises:
        CheatError: a name that is taken, no sentence, or neither what catches it nor why nothing does.
    """

    def enter(kernel: Kernel) -> Kernel:
        entry = Cheat(kernel, claims, caught, trust, case, salted)
        if entry.name in _CHEATS or not entry.attempt:
            raise CheatError(f"cheat {entry.reference}: expected a name of its own and a docstring")
        if bool(caught) == bool(trust):
            raise CheatError(f"cheat {entry.reference}: expected either what catches it or why nothing does")
        _CHEATS[entry.name] = entry
        return kernel

    return enter


def cheats() -> dict[str, Cheat]:
    """All cheats by name, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.tests.cheats.{family}")
    return dict(_CHEATS)
