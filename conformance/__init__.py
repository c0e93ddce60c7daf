"""mla-conformance: decides whether a Multi-head Latent Attention kernel is right.

The way through it: case → problem → reference and backend → judge → verdict → record → report. Public here are the
names of ``__all__`` (docs/python-api.md); torch is imported when tensors are wanted.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mla_conformance import roles
from mla_conformance.version import __version__

if TYPE_CHECKING:
    from mla_conformance.api import golden
    from mla_conformance.api.function_case import CaseSelection, FunctionCase
    from mla_conformance.api.function_case import find_case as case
    from mla_conformance.api.verdicts import FunctionVerdict, assert_close, assert_conforms, judge

__all__ = [
    "FunctionCase", "FunctionVerdict", "__version__", "assert_close", "assert_conforms", "case", "cases", "golden",
    "judge", "roles",
]  # fmt: skip

_LAZY = {"FunctionCase": "function_case:FunctionCase", "case": "function_case:find_case", "golden": "golden"}
_LAZY |= {name: f"verdicts:{name}" for name in ("FunctionVerdict", "assert_close", "assert_conforms", "judge")}
"""Where in the API's room a name stands."""


# Behind the import of ``roles``, which leaves the room of that name here as an attribute.
def cases(role: str, *, tier: str = "smoke", **wanted: object) -> "CaseSelection":
    """The cases of a role, to be iterated over, or as a decorator that parametrises ``case`` of a pytest test.

    Args:
        role: ``prefill``, ``decode``, ``sparse`` or ``indexer``.
        tier: ``smoke``, ``full`` or ``nightly``.
        wanted: fields as case ids name them, each with a value or a list of values: ``heads=[16, 128]``,
            ``cache="fp8"``; of ``q`` and ``kv`` the lengths that every request must have. Classes of the role's space
            as well: ``longest="257 to 1,024"``, ``queries="mixed"``. What is not asked for needs no declaration of a
            kernel (docs/python-api.md).

    Raises:
        InputError: an unknown role, tier, field or value, or values that no case has together; says what was expected.
    """
    from mla_conformance.api.function_case import select

    return select(role, tier, wanted)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{__name__}.api.{_LAZY[name]}")
