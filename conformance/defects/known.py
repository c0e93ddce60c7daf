"""What a known defect is, and the list of all of them."""

import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

import msgspec

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.layer.attention_layer import AttentionBackend
from mla_conformance.backends.roles import Role, role_of
from mla_conformance.defects.steps import kernels_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES

FAMILIES = (
    *("prefills", "prefill_calls", "decodes", "decode_caches", "decode_calls", "layer_caches", "layer_calls"),
    *("sparse_lists", "sparse_entries", "indexer", "topk", "preparation", "sparse_layers"),
    *("cache_writes", "cache_reads", "compression", "bounds"),
)
"""The modules that known defects stand in, in the order in which these are tried and told."""
_GROUPS: list[tuple[type, dict[str, Any]]] = []
"""Groups of which no kernel is made yet, with what is said of all of their kernels."""
_KNOWN: dict[str, "KnownDefect"] = {}
Emulation = KernelBackend | AttentionBackend
"""What an emulation is: a kernel, or a layer around kernels."""


class DefectError(ValueError):
    """A known defect that is declared wrongly."""


class ReportedBugs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The catalogue of bugs that were reported of the layers that are judged here.

    Attributes:
        sources: public threads, by the id of the known defect that emulates what they report.
        pipeline: threads of the pipeline of layers with selected keys: empty where a known defect emulates what they
            report, else what shows it, or why nothing does.
        not_emulated: why there is no emulation of the others, by their ids.
    """

    sources: dict[str, tuple[str, ...]]
    pipeline: dict[str, str]
    not_emulated: dict[str, str]


@cache
def reported_bugs() -> ReportedBugs:
    """The catalogue, ``fixtures/reported.toml``."""
    text = (files("mla_conformance.fixtures") / "reported.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), ReportedBugs)


@dataclass(frozen=True)
class KnownDefect:
    """A bug, emulated.

    Attributes:
        id: its id, of a reported one that in the catalogue of reported bugs.
        kernel: the emulation, of a backend of any role.
        killed_by: capability that is expected to kill it.
        related: capabilities that may fail before that one, because the bug is theirs too; any may before one of
            combinations.
    """

    id: str
    kernel: type[Emulation]
    killed_by: str
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
        """What ``certify --backend`` takes."""
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

    They are made once one of them is asked for, by its name in the module or as a known defect.

    Args:
        killed_by: as of :class:`KnownDefect`, and ``related``; ``but`` says it of a single one.
        related: see there.
        inside: as of :func:`emulation`, which says what a group's functions and classes are.
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
    """All that are entered.

    Raises:
        DefectError: an id that is taken, a capability that does not exist, or no sentence.
    """
    while _GROUPS:
        group, said = _GROUPS.pop(0)
        for kernel, about in kernels_of(group, str, **said):
            entry = KnownDefect(kernel.__name__.replace("_", "-"), kernel, **about)
            where = f"known defect '{entry.id}' ({entry.reference})"
            if entry.id in _KNOWN:
                raise DefectError(f"{where}: the id is taken by {_KNOWN[entry.id].reference}")
            for name in {entry.killed_by, *entry.related} - {*CAPABILITIES}:
                raise DefectError(f"{where}: no capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
            if not entry.sentence:
                raise DefectError(f"{where}: expected a docstring that says what is wrong")
            _KNOWN[entry.id] = entry
    return _KNOWN


def known_defects() -> dict[str, KnownDefect]:
    """All known defects by id, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.defects.{family}")
    return dict(sorted(_made().items(), key=lambda item: FAMILIES.index(item[1].family)))
