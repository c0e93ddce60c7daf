"""What a known defect is, how its kernel is written as one step, and the list of all of them."""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.resources import files
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import msgspec

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.layer.attention_layer import AttentionBackend
from mla_conformance.backends.roles import Role, role_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES

FAMILIES = (
    *("prefills", "prefill_calls", "decodes", "decode_caches", "decode_calls", "layer_caches", "layer_calls"),
    *("sparse_lists", "sparse_entries", "indexer", "topk", "preparation", "sparse_layers"),
    *("cache_writes", "cache_reads", "compression", "bounds", "trees"),
)
"""The modules that known defects stand in, in the order in which these are tried and told."""
_GROUPS: list[tuple[type, dict[str, Any]]] = []
"""Groups of which no kernel is made yet, with what is said of all of their kernels."""
_KNOWN: dict[str, "KnownDefect"] = {}
Emulation = KernelBackend | AttentionBackend  # what an emulation is: a kernel, or a layer around kernels


class ReportedBugs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, tuple[str, ...]]  # public threads, by the id of the known defect that emulates what they report
    # threads of the pipeline of layers with selected keys: empty where a known defect emulates what they report, else
    # what shows it, or why nothing does
    pipeline: dict[str, str]
    not_emulated: dict[str, str]  # why there is no emulation of the others, by their ids


@cache
def reported_bugs() -> ReportedBugs:
    text = (files("mla_conformance.fixtures") / "reported.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), ReportedBugs)


@dataclass(frozen=True)
class KnownDefect:
    id: str  # its id, of a reported one that in the catalogue of reported bugs
    kernel: type[Emulation]  # the emulation, of a backend of any role
    killed_by: str  # capability that is expected to kill it
    # capabilities that may fail before that one, because the bug is theirs too; any may before one of combinations
    related: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Public threads that report it; none if the like of it was only thought of."""
        return reported_bugs().sources.get(self.id, ())

    @property
    def roles(self) -> tuple[Role, ...]:
        return judged_roles(self.kernel)

    @property
    def family(self) -> str:
        return self.kernel.__module__.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        return sentence_of(self.kernel)

    @property
    def reference(self) -> str:
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


def sentence_of(wrong: type) -> str:
    """What is wrong with a class, as its docstring says in one sentence."""
    return " ".join((wrong.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")


def judged_roles(kernel: type[Emulation]) -> tuple[Role, ...]:
    """The roles whose cases are about an emulation: its own, and of a kernel a layer if it names the one beside it."""
    own = role_of(kernel)
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(own)
    return (own,) if other is None or getattr(kernel, f"{other}_backend", None) is None else (own, Role.LAYER)


def defects(
    killed_by: str = "", *, related: tuple[str, ...] = (), inside: tuple[type, str] | None = None
) -> Callable[[type], type]:
    """Class decorator that enters each kernel of a group: its name is an id, its docstring the sentence.

    They are made once one of them is asked for, by its name in the module or as a known defect. ``but`` says
    ``killed_by`` and ``related`` of a single one; :func:`emulation` says what ``inside`` is.
    """

    def enter(group: type) -> type:
        _GROUPS.append((group, {"inside": inside, "killed_by": killed_by, "related": related}))
        vars(sys.modules[group.__module__])["__getattr__"] = _named
        return group

    return enter


def _named(name: str) -> Any:
    entry = None if name.startswith("__") else _made().get(name.replace("_", "-"))
    if entry is None:
        raise AttributeError(f"no known defect is called {name}")
    return entry.kernel


def _made() -> dict[str, KnownDefect]:
    """All that are entered; a ValueError of a taken id, a capability that does not exist, or no sentence."""
    while _GROUPS:
        group, said = _GROUPS.pop(0)
        for kernel, about in kernels_of(group, str, **said):
            entry = KnownDefect(kernel.__name__.replace("_", "-"), kernel, **about)
            where = f"known defect '{entry.id}' ({entry.reference})"
            if entry.id in _KNOWN:
                raise ValueError(f"{where}: the id is taken by {_KNOWN[entry.id].reference}")
            for name in {entry.killed_by, *entry.related} - {*CAPABILITIES}:
                raise ValueError(f"{where}: no capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
            if not entry.sentence:
                raise ValueError(f"{where}: expected a docstring that says what is wrong")
            _KNOWN[entry.id] = entry
    return _KNOWN


def known_defects() -> dict[str, KnownDefect]:
    """All known defects by id, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.defects.{family}")
    return dict(sorted(_made().items(), key=lambda item: FAMILIES.index(item[1].family)))


_SAID: dict[Any, dict[str, Any]] = {}
_SITE = re.compile(r"(?:(before|behind)_)?(_?\w+?)(?:__(_?\w+))?")
"""Where a step stands: in place of a method if neither is said, and which call around it notes its arguments."""


def but(site: str = "", **said: Any) -> Callable[[Any], Any]:
    """Decorator of a kernel in a group: a site that its name lacks, what is said of it alone, its attributes."""

    def note(step: Any) -> Any:
        _SAID[step] = {"site": site, **said} if site else said
        return step

    return note


def variant(sentence: str = "", *bases: type, **said: Any) -> Any:
    """A kernel of a group that differs by classes that stand before the group's, or by what is said of it."""
    return but(**said)(type("variant", bases, {"__doc__": sentence}))


def named_as_class(key: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in key.split("_"))


def kernels(inside: tuple[type, str] | None = None) -> Callable[[type], type]:
    """Class decorator of a group of honest kernels, each of which becomes a class of its module."""

    def make(group: type) -> type:
        list(kernels_of(group, named_as_class, inside=inside))
        return group

    return make


def kernels_of(group: type, name: Callable[[str], str], **said: Any) -> Iterator[tuple[type, dict[str, Any]]]:
    """The kernels that a group defines, put into its module, with what is said of each.

    A function of it is one step, named ``kernel__site``; a class of it has several. What begins with an underscore, or
    is a method of the group's bases, is shared by all.
    """
    for key, step in list(vars(group).items()):
        own = not key.startswith("_") and not hasattr(super(group, group), key)
        if own and isinstance(step, FunctionType | staticmethod | type):
            delattr(group, key)
            kernel, _, site = key.partition("__")
            about = {"site": site, "inside": None, **said, **_SAID.pop(step, {})}
            attributes = {each: about.pop(each) for each in set(about) - {"site", "inside", *said}}
            made = emulation(group, name(kernel), step, about.pop("site"), about.pop("inside"), attributes)
            setattr(sys.modules[made.__module__], made.__name__, made)
            yield made, about


def emulation(
    group: type, name: str, step: Any, site: str, inside: tuple[type, str] | None, attributes: dict[str, Any]
) -> Any:
    """The class ``group``, an honest kernel, with one step of its own: a method, or a class with several.

    Args:
        site: the method; its underscore only where it alone tells it from another. Behind ``before_`` the step is
            called first, and returns its positional arguments anew, or nothing if they stay as they are; behind
            ``behind_`` it is called with the results, and returns others or changes them in place. Its keyword-only
            arguments are further ones of the call, or of the call around it that is named behind ``__``.
        inside: a layer of which the class is a part, and the attribute or method that names this part.
    """
    about = {"__module__": group.__module__, "__doc__": step.__doc__}
    part = inside[1] if inside else name
    if isinstance(step, type):
        made = type(part, (step, group), {**about, **attributes})
    else:
        said = _SITE.fullmatch(site)
        if said is None:
            raise TypeError(
                f"{step.__qualname__}: expected the site behind a kernel's name, as in kernel__before_method"
            )
        place, *sites = said.groups()
        method, *around = [each if hasattr(group, each) else f"_{each}" for each in sites if each]
        methods = {method: _standing(lambda: made, place, group, [method, *around], step) if place or around else step}
        methods |= {each: _noting(lambda: made, group, each) for each in around}
        made = type(part, (group,), {**about, **attributes, **methods})
    if inside is None:
        return made
    return type(name, inside[:1], {**about, part: staticmethod(lambda: made) if part.startswith("get_") else made})


def _standing(made: Callable[[], type], place: str | None, group: type, sites: list[str], step: Any) -> Any:
    """A method that calls the usual one of ``made``'s bases with the step before or behind it, or the step alone."""
    method, usual = sites[0], getattr(group, sites[0])
    form = signature(usual)
    kinds = {key: each.kind for key, each in list(signature(step).parameters.items())[1:]}
    first = [key for key, kind in kinds.items() if kind is not Parameter.KEYWORD_ONLY]
    named = [key for key in kinds if key not in first]
    known = {key for each in sites for key in signature(getattr(group, each)).parameters}
    if unknown := {*named, *(first if place == "before" else ())} - known:
        raise TypeError(f"{step.__qualname__}: expected arguments of {' and '.join(sites)}, got {', '.join(unknown)}")

    @wraps(usual)
    def stands(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = form.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        further = {key: given[key] if key in given else self.__dict__["_noted"][key] for key in named}
        if not place:
            return step(self, *args, **kwargs, **further)
        call = getattr(super(made(), self), method)
        if place == "behind":
            result = call(*args, **kwargs)
            other = step(self, *(result if len(first) > 1 else (result,)), **further)
            return result if other is None else other
        other = step(self, *(given[key] for key in first), **further)
        if other is not None:
            given.update(zip(first, other if len(first) > 1 else (other,), strict=True))
        return call(*bound.args[1:], **bound.kwargs)

    return stands


def _noting(made: Callable[[], type], group: type, method: str) -> Any:
    """A method that notes its arguments for the steps that it calls."""
    usual = getattr(group, method)
    form = signature(usual)

    @wraps(usual)
    def notes(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._noted = form.bind(self, *args, **kwargs).arguments
        return getattr(super(made(), self), method)(*args, **kwargs)

    return notes
