"""What a known defect is, how its kernel is written as one step, and the list of all of them."""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from importlib.resources import files
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any

import msgspec

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.layer.attention_layer import AttentionBackend
from mla_conformance.backends.roles import Role, role_of
from mla_conformance.defects.bases import EagerLayer

FAMILIES = (
    *("prefills", "prefill_calls", "decodes", "decode_calls", "layers", "sparse_lists", "sparse_entries"),
    *("indices", "sparse_layers", "entries", "bounds", "trees"),
)
"""The modules that known defects stand in, in the order in which these are tried and told."""
Emulation = KernelBackend | AttentionBackend  # what an emulation is: a kernel, or a layer around kernels
_KERNELS: list[type[Emulation]] = []  # known defects of the modules that were imported
ALTERNATIVES: list[type[Emulation]] = []  # the same of honest kernels


class ReportedBugs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, tuple[str, ...]]  # public threads, by the id of the known defect that emulates what they report
    # threads of the pipeline of layers with selected keys: empty where a known defect emulates what they report, else
    # what shows it, or why nothing does
    pipeline: dict[str, str]
    not_emulated: dict[str, str]  # why there is no emulation of the others, by their ids


@cache
def reported_bugs() -> ReportedBugs:
    return msgspec.toml.decode((files("mla_conformance.fixtures") / "reported.toml").read_bytes(), type=ReportedBugs)


@dataclass(frozen=True)
class KnownDefect:
    id: str  # its id, of a reported one that in the catalogue of reported bugs
    sentence: str  # what is wrong with it
    kernel: type[Emulation]  # the emulation, of a backend of any role
    killed_by: str  # capability that is expected to kill it
    related: tuple[str, ...] = ()  # capabilities that may fail before that one; any may before one of combinations

    @property
    def sources(self) -> tuple[str, ...]:
        """Public threads that report it; none if the like of it was only thought of."""
        return reported_bugs().sources.get(self.id, ())

    @property
    def family(self) -> str:
        return self.kernel.__module__.rpartition(".")[2]

    @property
    def reference(self) -> str:
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


@cache
def known_defects() -> dict[str, KnownDefect]:
    """All known defects by id, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.defects.{family}")
    told = tomllib.loads((files("mla_conformance.defects") / "known.toml").read_text(encoding="utf-8"))
    said = {id: (name, text) for name, those in told["killed_by"].items() for id, text in those.items()}
    kernels = {kernel.__name__.replace("_", "-"): kernel for kernel in _KERNELS}
    if differing := said.keys() ^ kernels.keys():
        raise TypeError(f"expected an entry of known.toml for each kernel, got one alone of {', '.join(differing)}")
    related = {id: tuple(names.split()) for names, ids in told["related"].items() for id in ids}
    if unknown := related.keys() - kernels.keys():
        raise TypeError(f"expected related of known defects in known.toml, got {', '.join(unknown)}")
    found = (KnownDefect(id, said[id][1], kernel, said[id][0], related.get(id, ())) for id, kernel in kernels.items())
    return {entry.id: entry for entry in sorted(found, key=lambda entry: FAMILIES.index(entry.family))}


def judged_roles(kernel: type[Emulation]) -> tuple[Role, ...]:
    """The roles whose cases are about an emulation: its own, and of a kernel a layer if it names the one beside it."""
    own = role_of(kernel)
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(own)
    return (own,) if other is None or getattr(kernel, f"{other}_backend", None) is None else (own, Role.LAYER)


class Defects:
    """Beside a kernel, base of a group whose kernels are known defects: a name is an id, which ``known.toml`` explains.

    Of a layer, a kernel is the ``part`` that an attribute or a method of this name gives.
    """

    def __init_subclass__(cls, part: str = "") -> None:
        super().__init_subclass__()
        if Defects in cls.__bases__:
            _KERNELS.extend(kernels_of(cls, str, part))


class Honest:
    """The same of honest kernels, each of which becomes a class of its module."""

    def __init_subclass__(cls, part: str = "") -> None:
        super().__init_subclass__()
        if Honest in cls.__bases__:
            ALTERNATIVES.extend(kernels_of(cls, named_as_class, part))


def named_as_class(key: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in key.split("_"))


_SITE = re.compile(r"(?:(before|behind)_)?(_?\w+?)(?:__(_?\w+))?")
"""Where a step stands: in place of a method if neither is said, and which call around it notes its arguments."""


Row = dict[str, Any]
"""A kernel of a group: its ``step``, the ``site`` where that stands, ``when`` it is taken, classes that stand before
the group's (``on``), and attributes."""


def but(site: str = "", **said: Any) -> Callable[[Any], Row]:
    """Decorator of a kernel in a group: a site that its name lacks, when its step is taken, its attributes."""
    return lambda step: {**({"site": site} if site else {}), "step": step, **said}


def variant(*bases: type, **said: Any) -> Row:
    """A kernel that differs by classes that stand before the group's, or by attributes."""
    return {"step": [], "on": bases, **said}


def instead(site: str, step: Any, **said: Any) -> Row:
    """A kernel with another method."""
    return {"site": site, "step": step, **said}


def behind(site: str, step: Any = None, *, output: Any = None, lse: Any = None, **said: Any) -> Row:
    """A kernel whose results are changed by a step, or are what functions make of them."""
    return {"site": f"behind_{site}", "step": step or _replacing({"output": output, "lse": lse}), **said}


def before(site: str, step: Any = None, **given: Any) -> Row:
    """A kernel whose arguments are changed by a step, or become values or what functions make of them."""
    said = {"when": given.pop("when")} if "when" in given else {}
    return {"site": f"before_{site}", **said, **({"step": step, **given} if step else {"step": _replacing(given)})}


def together(*rows: Row, when: Any = None, **said: Any) -> Row:
    """A kernel with several steps."""
    return {"step": [{"when": when, **row} for row in rows], **said}


def _replacing(makes: dict[str, Any]) -> Any:
    """A step that replaces these arguments or results by a value, or by what a function makes of them."""

    def step(self: Any, *values: Any) -> Any:
        both = zip(makes.values(), values, strict=True)
        made = [make(value) if callable(make) else value if make is None else make for make, value in both]
        return made if len(made) > 1 else made[0]

    named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *makes)]
    step.__signature__ = Signature(named)  # type: ignore[attr-defined]
    return step


def kernels_of(group: type, name: Callable[[str], str], part: str = "") -> Iterator[Any]:
    """The kernels that a group defines, put into its module.

    A function of it is one step, named ``kernel__site``, as is a row; a class of it has several. What begins with an
    underscore, or is a method of the group's bases, is shared by all.
    """
    for key, found in list(vars(group).items()):
        own = not key.startswith("_") and not hasattr(super(group, group), key)
        if own and isinstance(found, FunctionType | staticmethod | type | dict):
            delattr(group, key)
            kernel, _, site = key.partition("__")
            row = {"site": site, **(found if isinstance(found, dict) else {"step": found})}
            made = _emulation(group, name(kernel), part, **row)
            setattr(sys.modules[made.__module__], made.__name__, made)
            yield made


def _emulation(
    group: type, name: str, part: str, step: Any, site: str, when: Any = None, on: Any = (), **attributes: Any
) -> Any:
    """The class ``group``, an honest kernel, with one step of its own: a method, or a class with several.

    Args:
        part: of a layer, the attribute or method that gives the class; else it is none.
        site: the method; its underscore only where it alone tells it from another. Behind ``before_`` the step is
            called first, and returns its positional arguments anew, or nothing if they stay as they are; behind
            ``behind_`` it is called with the results, and returns others or changes them in place. Its keyword-only
            arguments are further ones of the call, or of the call around it that is named behind ``__``.
        when: a function of such arguments that says whether the step is taken.
        on: classes before ``group``.
    """
    is_class = isinstance(step, type)
    about = {"__module__": group.__module__, "__doc__": None if isinstance(step, list) else step.__doc__}
    made = type(part or name, (*((step,) if is_class else ()), *on, group), {**attributes, **about})
    alone = [] if is_class else [{"site": site, "step": step, "when": when}]
    for each in step if isinstance(step, list) else alone:
        _take(made, **each)
    if not part:
        return made
    own = staticmethod(lambda: made) if part.startswith("get_") else made
    return type(name, (EagerLayer,), {**about, part: own})


def _take(made: type, site: str, step: Any, when: Any) -> None:
    said = _SITE.fullmatch(site)
    if said is None:
        raise TypeError(f"{made.__name__}: expected the site behind a kernel's name, as in kernel__before_method")
    place, *sites = said.groups()
    method, *around = [each if hasattr(made, each) else f"_{each}" for each in sites if each]
    is_plain = not (place or around or when)
    setattr(made, method, step if is_plain else _standing(made, place, [method, *around], step, when))
    for each in around:
        setattr(made, each, _standing(made, "around", [each], lambda: None, None))


def _standing(made: type, place: str | None, sites: list[str], step: Any, when: Any) -> Any:
    """A method that calls the usual one of the bases of ``made`` with the step before or behind it, or the step.

    Of a call around another it notes the arguments.
    """
    method, usual = sites[0], getattr(made, sites[0])
    form = signature(usual)
    kinds = {key: each.kind for key, each in signature(step).parameters.items() if each.default is each.empty}
    owner = kinds.pop("self", None)  # a row may do without
    first = [key for key, kind in kinds.items() if kind is not Parameter.KEYWORD_ONLY]
    named = [key for key in kinds if key not in first]
    asked = list(signature(when).parameters) if when else []
    known = {key for each in sites for key in signature(getattr(made, each)).parameters}
    if unknown := {*named, *asked, *(first if place == "before" else ())} - known:
        raise TypeError(f"{made.__name__}: expected arguments of {' and '.join(sites)}, got {', '.join(unknown)}")

    @wraps(usual)
    def stands(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = form.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given, call = bound.arguments, getattr(super(made, self), method)
        noted = {**self.__dict__.get("_noted", {}), **given}
        if place == "around":
            self._noted = given
        if place == "around" or (when and not when(*(noted[key] for key in asked))):
            return call(*args, **kwargs)
        further = {key: noted[key] for key in named}
        stepped = step if owner is None else partial(step, self)
        if not place:
            return stepped(*args, **kwargs, **further)
        if place == "behind":
            result = call(*args, **kwargs)
            other = stepped(*(result if len(first) > 1 else (result,)), **further)
            return result if other is None else other
        other = stepped(*(given[key] for key in first), **further)
        if other is not None:
            given.update(zip(first, other if len(first) > 1 else (other,), strict=True))
        return call(*bound.args[1:], **bound.kwargs)

    return stands
