"""The scoreboard as a value: its records, what each is worth today, and which one stands for a kernel."""

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Literal

from msgspec import Struct

from mla_conformance.backends.roles import ROLES
from mla_conformance.certificate import certificate, verify
from mla_conformance.certificate.records import KeptRecord, RecordLine, is_records, read_records, sanitized_problems
from mla_conformance.files.whole import InputError, convert
from mla_conformance.report import summary
from mla_conformance.report.causes import grouped
from mla_conformance.version import SUITE_VERSION, numbers_of

_NUMBERS = 6  # of a version, by which records are in order
_LINK = re.compile(r"https://[\w./#?=&%:~+-]+", re.ASCII)


def versions_of(distributions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in distributions.items()) or "version not stated"


@dataclass
class KnownFailure:
    reason: str  # the sentence of the expectation that waives them, behind the place where it stands
    findings: list[certificate.Finding]  # at least one

    def __post_init__(self) -> None:
        self.example = min(self.findings, key=lambda finding: (len(finding.case), finding.case))
        self.links = [link.rstrip(".,;:") for link in _LINK.findall(self.reason)]


@dataclass
class Entry:
    record: certificate.Certificate
    old: str  # why it counts for nothing here, and how to renew it; empty if it counts
    sanitized: tuple[certificate.SanitizedKernel, ...] = ()  # what tools of compute-sanitizer reported of the kernel
    not_yet: int = 0  # number of cases of the list here that its own lacked

    def __post_init__(self) -> None:
        record, self.versions = self.record, versions_of(self.record.distributions)
        # Records of a later suite compare greater, then those of a newer library, then later ones.
        version = numbers_of(next(iter(record.distributions.values()), ""))[:_NUMBERS]
        self.order = [*numbers_of(record.suite), *version, *[0] * (_NUMBERS - len(version)), record.date]
        self._records = certificate.records_of(record.backend, record.reference, record.cases)
        self.counts = summary.Counts.of(self._records)
        wrong, judged = self.counts.failed + self.counts.waived, self.counts.verdicts
        self.is_wrong, self.verdict = wrong > 0, "nothing judged"
        if judged:
            right = "" if wrong else f"right: {summary.right_on(self._records)}"
            self.verdict = right or f"wrong on {wrong:,} of {judged:,} judged cases"
        # How the verdict looks: a style, and a sign.
        self.shown = ("fail", "✘") if wrong else ("pass", "✔") if self.counts.judged else ("unsupported", "–")
        self.state = f"suite {record.suite}" + (f", {self.not_yet:,} cases not yet judged" if self.not_yet else "")
        if self.old:
            self.state = f"of suite {record.suite}: outdated"
        # By the reason without the place of the entry that says it.
        groups = grouped(record.findings, lambda each: each.expectation.partition(": ")[2] or each.expectation)
        found = [KnownFailure(reason, findings) for reason, findings in groups.items()]
        self.failures = sorted(found, key=lambda failure: -len(failure.findings))

    @cached_property
    def pairs(self) -> summary.JudgedPairs | None:
        """The pairs of classes that it claims, over all roles; None of an earlier suite, which had other classes."""
        if self.record.suite != SUITE_VERSION:
            return None
        fitted = sorted(self.record.cases.keys() - verify.listed_ids())
        return summary.total(summary.judged_pairs(self._records, fitted))

    @cached_property
    def roles(self) -> dict[str, dict[str, summary.CapabilitySummary]]:
        """Its capabilities by name, by the role whose cases of them are judged or known to fail."""
        found = {}
        for role, records in grouped(self._records, lambda record: summary.role_and_page(record.case)[0]).items():
            counts = summary.Counts.of(records)
            if counts.listed > counts.unsupported:
                summaries = summary.summarise(records, [record.case for record in records])
                found[role] = {capability.name: capability for capability in summaries}
        return found


def read_entries(paths: Iterable[Path]) -> tuple[list[Entry], list[RecordLine]]:
    """The records of files, and the files and lines that cannot be taken for one, each with why."""
    lines = list[RecordLine]()
    for path in paths:
        if is_records(path):
            lines += read_records(path)
            continue
        try:
            lines.append(RecordLine(str(path), "", KeptRecord(certificate.read_certificate(path))))
        except InputError as error:
            lines.append(RecordLine(str(path), "", None, str(error)))
    entries, refused = list[Entry](), list[RecordLine]()
    for line in lines:
        if line.kept:
            record, today = line.kept.certificate, datetime.date.today()
            old = verify.age(record)
            against = [problem for problem in verify.problems(record, today) if problem != old]
            against += sanitized_problems(record, line.kept.sanitized)
            if not against:
                not_yet = verify.listed_ids() - verify.judged_list(record)
                entries.append(Entry(record, old, line.kept.sanitized, len(not_yet)))
                continue
            line = replace(line, kept=None, why="; ".join(against))
        refused.append(line)
    return entries, refused


class RankedKernel(Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # as the engine calls it
    kernel: str = ""  # the backend that drives this kernel here; empty for none
    packages: dict[str, str] = {}  # versions of the distributions of the engine's own build; empty if it brings none
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


def profiles() -> tuple[Profile, ...]:
    path = files("mla_conformance.fixtures") / "engines.toml"
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return convert(read, dict[Literal["profile"], tuple[Profile, ...]], str(path))["profile"]


@dataclass
class Board:
    entries: tuple[Entry, ...]  # in any order
    refused: tuple[RecordLine, ...]  # what is not shown as a record
    profiles: tuple[Profile, ...]  # what engines pick
    deployed: tuple[summary.RunSummary, ...] = ()  # runs of ``certify --model``

    def __post_init__(self) -> None:
        newest_first = sorted(self.entries, key=lambda entry: entry.order, reverse=True)
        self.by_kernel = dict(sorted(grouped(newest_first, lambda entry: entry.record.backend).items()))
        alike = grouped(newest_first, lambda x: (x.record.backend, x.record.device, x.versions))
        self.newest = [entries[0] for _, entries in sorted(alike.items())]
        self.cases = list(dict.fromkeys(case for entry in self.entries for case in entry.record.cases))

    @property
    def roles(self) -> list[tuple[str, list[str], list[Entry]]]:
        """Each role with the capabilities that any kernel has of it, and these kernels."""
        found = []
        for role in (*ROLES, summary.OTHER_ROLE):
            entries = [entry for entry in self.newest if role in entry.roles]
            judged = (name for entry in entries for name, each in entry.roles[role].items() if each.counts.judged)
            found += [(role, list(dict.fromkeys(judged)), entries)] if entries else []
        return found

    def answer(self, profile: Profile, candidate: RankedKernel) -> Entry | None:
        """The record that says most of a kernel that an engine may pick: of its own build if there is one, then new."""
        judged = (candidate.kernel, profile.compute_capability)
        named = ((x, (x.record.backend, x.record.environment.get("compute_capability"))) for x in self.entries)
        found = [entry for entry, name in named if name == judged]
        packages = candidate.packages.items()
        return max(found, key=lambda x: (packages <= x.record.distributions.items(), x.order), default=None)
