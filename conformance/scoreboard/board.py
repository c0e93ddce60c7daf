"""The scoreboard as a value: which record stands for a kernel, what came before it, and what engines make of it.

What engines pick on a GPU stands in ``fixtures/engines.toml``, with its sources.
"""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from msgspec import Struct

from mla_conformance.files.inputs import convert
from mla_conformance.report.causes import grouped
from mla_conformance.report.summary import RunSummary
from mla_conformance.scoreboard.entry import ROLES, Entry, RefusedRecord


class RankedKernel(Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # as the engine calls it
    kernel: str = ""  # the backend that drives this kernel here; empty for none
    packages: dict[str, str] = {}  # versions of the distributions that the engine's own build of it comes from
    when: str = ""  # what it is picked for, in words


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The kernels that an engine tries for one role on one kind of GPU, in its order."""

    engine: str  # name and version
    gpu: str  # as people call it
    compute_capability: str  # of the GPU, as records tell it
    role: str  # what of a layer it is for
    torch: str  # what the engine asks for; a kernel that is compiled where it runs may differ under another
    source: str  # where that order stands
    candidates: tuple[RankedKernel, ...]  # in that order


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    profile: tuple[Profile, ...]


def profiles() -> tuple[Profile, ...]:
    path = files("mla_conformance.fixtures") / "engines.toml"
    return convert(tomllib.loads(path.read_text(encoding="utf-8")), _File, str(path)).profile


@dataclass(frozen=True)
class Board:
    entries: tuple[Entry, ...]  # in any order
    refused: tuple[RefusedRecord, ...]  # what is not shown as a record
    profiles: tuple[Profile, ...]  # what engines pick
    deployed: tuple[RunSummary, ...] = ()  # runs of ``certify --model``

    @cached_property
    def history(self) -> dict[tuple[str, ...], list[Entry]]:
        return _groups(self.entries, lambda entry: (entry.record.backend, entry.record.device))

    @cached_property
    def newest(self) -> list[Entry]:
        groups = _groups(self.entries, lambda entry: (entry.record.backend, entry.record.device, entry.versions))
        return [group[0] for group in groups.values()]

    @cached_property
    def by_kernel(self) -> dict[str, Entry]:
        return {name[0]: group[0] for name, group in _groups(self.entries, lambda e: (e.record.backend,)).items()}

    @property
    def roles(self) -> list[tuple[str, list[str], list[Entry]]]:
        """Each role with the capabilities that any kernel has of it, and these kernels."""
        found = []
        for role in ROLES:
            entries = [entry for entry in self.newest if role in entry.roles]
            judged = (name for entry in entries for name, each in entry.roles[role].items() if each.counts.judged)
            found += [(role, list(dict.fromkeys(judged)), entries)] if entries else []
        return found

    def answer(self, profile: Profile, candidate: RankedKernel) -> Entry | None:
        """The record that says most of a kernel that an engine may pick: of its own build if there is one, then new."""
        found = [
            entry
            for entry in self.entries
            if entry.record.backend == candidate.kernel
            and entry.record.environment.get("compute_capability") == profile.compute_capability
        ]
        return max(found, key=lambda entry: (is_own_build(entry, candidate), entry.order), default=None)


def is_own_build(entry: Entry, candidate: RankedKernel) -> bool:
    """Whether the record is of the packages that the engine itself brings or asks for."""
    return candidate.packages.items() <= entry.record.distributions.items()


def _groups(entries: Iterable[Entry], key: Callable[[Entry], tuple[str, ...]]) -> dict[tuple[str, ...], list[Entry]]:
    """By names in their order, the newest of each group first."""
    newest_first = sorted(entries, key=lambda entry: entry.order, reverse=True)
    return dict(sorted(grouped(newest_first, key).items()))
