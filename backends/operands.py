"""Operands as a table: ``Annotated[Tensor, Form("T, H, D", "model")]`` in the signature of an entry or its metadata."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mla_conformance.backends.kernel import expect

AT_LEAST = " or more"
_SIZES = "T, S, B, B + 1, N, H, K, K', P, R, L + R, P + R, V, L, D, C, m, C · D, 2 · C · D, blocks, page, width, "
_SIZES += "index width, max blocks, pages, state page, state pages, columns, rows, hidden, Σ q², 1"
SIZES = set(_SIZES.split(", "))
DTYPES = {"", "model", "input", "codes", "entries", "index entries"}
"""Names of sizes and of dtypes that tables may use; a role from outside adds its own."""
AnyTable = TypeVar("AnyTable", bound=Callable[..., Any])


@dataclass(frozen=True)
class Form:
    # dimensions; the first says whose the parts are: T query tokens, S keys, B requests. A name stands for a size that
    # who checks knows, or else for any; ``T or more`` has rows behind those that the metadata counts
    shape: str
    # or a name for one that who checks knows, or else for any; of several, one
    dtype: torch.dtype | str | tuple[torch.dtype | str, ...] = ""
    says: str = ""  # what else a refusal says of it
    written: bool = False  # whether the entry writes it

    dims: list[str] = field(init=False, compare=False, repr=False)  # the names of its sizes

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", [dim.removesuffix(AT_LEAST) for dim in self.shape.split(", ") if dim])
        dtypes = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)
        for what, names, known in (
            ("sizes", self.dims, SIZES),
            ("dtypes", [each for each in dtypes if isinstance(each, str)], DTYPES),
        ):
            if unknown := [name for name in names if name not in known]:
                expected = f"expected {what} of {', '.join(sorted(known - {''}))}"
                raise TypeError(f"Form({self.shape!r}): {expected}; got {unknown[0]!r}")

    def has(self, dim: str) -> bool:
        """Whether it has a part for each of this dimension."""
        return self.dims[:1] == [dim]


def table(of: AnyTable) -> AnyTable:
    """Refuse by TypeError an entry, or a dataclass of metadata, that has a tensor without a form."""
    for name, kind in of.__annotations__.items():
        bare = () if hasattr(kind, "__metadata__") else getattr(kind, "__args__", (kind,))
        if name != "return" and Tensor in bare:
            expected = "expected a form of it, Annotated[Tensor, Form(...)], got none"
            raise TypeError(f"{of.__qualname__}.{name}: {expected}")
    return of


def takes(entry: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a method that calls of an entry go to: it finds what they hand over in one object, by its name."""
    form = signature(entry)

    def decorate(method: Callable[..., Any]) -> Any:
        @wraps(entry)
        def call(*given: Any, **named: Any) -> Any:
            bound = form.bind(*given, **named)
            bound.apply_defaults()
            return method(given[0], SimpleNamespace(**bound.arguments))

        vars(call)["__isabstractmethod__"] = False
        return call

    return decorate


@cache
def forms_of(of: Callable[..., Any]) -> Mapping[str, Form]:
    """The forms in an entry's signature or in a dataclass and its bases, by name, in their order."""
    annotated = (getattr(each, "__annotations__", {}) for each in reversed(getattr(of, "__mro__", (of,))))
    noted = {name: getattr(kind, "__metadata__", ()) for each in annotated for name, kind in each.items()}
    return {name: form for name, notes in noted.items() for form in notes if isinstance(form, Form)}


def require_forms(
    of: Callable[..., Any] | Mapping[str, Form],
    given: Mapping[str, Any] | Sequence[Tensor | None],
    known: Mapping[str, Any],
) -> None:
    """Refuse tensors ``given`` by name or in order of another form; names stand for what is ``known``."""
    forms = of if isinstance(of, Mapping) else forms_of(of)
    named = given if isinstance(given, Mapping) else dict(zip(forms, given, strict=False))
    for name, form in forms.items():
        if (x := named.get(name)) is None:
            continue
        if unknown := [dim for dim in form.dims[x.dim() :] if dim not in known]:
            raise ValueError(f"{name}: expected [{form.shape}], got {list(x.shape)}, without {unknown[0]}")
        sizes = [*x.shape, *form.dims[x.dim() :]]  # its own where nobody knows a size
        shape = [known.get(dim, own) for dim, own in zip(form.dims, sizes, strict=False)]
        if "T" in known and form.shape.startswith((f"T{AT_LEAST}", f"S{AT_LEAST}")):
            if list(x.shape[1:]) != shape[1:] or x.shape[0] < shape[0]:
                expected = f"at least {shape[0]} tokens of {shape[1:]} by the metadata"
                raise ValueError(f"{name}: expected {expected}, got shape {list(x.shape)}")
            continue
        kinds = form.dtype if isinstance(form.dtype, tuple) else (form.dtype,)
        dtypes = [known.get(each, x.dtype) if isinstance(each, str) else each for each in kinds]
        expect(name, x, tuple(shape), x.dtype if x.dtype in dtypes else dtypes[0], form.says)
