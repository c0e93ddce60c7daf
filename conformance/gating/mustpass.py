"""What has to be judged, and what to be passed: backends, and must-pass lists by capability profile.

A profile is what a case asks for beyond bf16, its role's usual head dims and the two required entries. It binds a
backend unless all of its cases are unsupported, as those are on a CPU that only a GPU is asked for.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from mla_conformance.backends import hub, references
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.files.whole import InputError, decode, read_bytes, read_text
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.report.summary import BackendSummary
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, added_cases, first_cases, is_due_on_gpu

CORE, SHIPPED = "core", "shipped"  # a profile, and the suite's own list, by name
_CORES = (CORE, "decode", "sparse_decode", "sparse_prefill", "index_logits", "index_topk")  # one at least binds


def profile_of(case: Case) -> str:
    entry = CAPABILITIES[case.capability]
    if entry.probes_refusals:
        return case.profile or CORE
    dims = f"dims_{case.dims}" if case.dims != case.defaults()["dims"] else ""
    dtype, gpu = case.dtype if case.dtype != "bf16" else "", "gpu" if is_due_on_gpu(case) else ""
    device = "graph" if entry.captures else "cuda" if entry.needs_cuda else "large" if entry.large else ""
    return "+".join(filter(None, (case.profile, entry.needs, dims, dtype, device, gpu, *case.asks))) or CORE


@dataclass(frozen=True)
class MustPass:
    profiles: Mapping[str, tuple[str, ...]]  # case ids of each profile
    name: str = field(default="", compare=False)  # as it was asked for
    suite: str = field(default="", compare=False)  # version of the suite that its cases are of; a file's is not known
    demanded: tuple[str, ...] = ()  # profiles that bind a backend whatever it declares

    @staticmethod
    @cache
    def of_vocabulary() -> "MustPass":
        return MustPass.of_cases((*first_cases(), *added_cases()))

    @staticmethod
    @lru_cache(maxsize=8)
    def of_cases(cases: Sequence[Case]) -> "MustPass":
        return MustPass.of((profile_of(case), case.id) for case in cases)

    @staticmethod
    def of_suite() -> "MustPass":
        """The list of this suite version: what the vocabulary gives, if it began with that."""
        first = MustPass.of_cases(first_cases()).digest
        source = "mla_conformance.fixtures/mustpass.json"
        text = (files("mla_conformance.fixtures") / "mustpass.json").read_text(encoding="utf-8")
        expected = decode(text, dict[str, str], source).get(SUITE_VERSION)
        if expected != first:
            said = f"expected digest {expected} of the must-pass list of suite {SUITE_VERSION}, got {first}"
            what = "a changed list needs a new version, and a line that is added to it the version that does"
            raise InputError(f"{source}: {said} from the vocabulary; {what}, +YEAR.N.PATCH")
        return MustPass.of_vocabulary()

    @staticmethod
    def asked(texts: Sequence[str]) -> "MustPass":
        """The list that options name: a file, ``shipped``, or profiles, which then bind whatever a backend declares."""
        names = [text.partition("@")[0] for text in texts]
        if len(texts) == 1 and Path(texts[0]).is_file():
            return replace(MustPass.read(Path(texts[0])), name=texts[0])
        shipped = MustPass.of_suite()
        for text, name in zip(texts, names, strict=True):
            if name not in (SHIPPED, *shipped.profiles):
                listed = f"profiles that `mla-conformance mustpass` lists, such as {', '.join(_CORES)}"
                said = f"expected a file, {SHIPPED}, or {listed}; each with or without @{SUITE_VERSION}"
                raise InputError(f"--must-pass {text}: {said}")
            if "@" in text and text != f"{name}@{SUITE_VERSION}":
                raise InputError(f"--must-pass {text}: the list that is installed here is {name}@{SUITE_VERSION}")
        found = replace(shipped, name=" ".join(f"{name}@{SUITE_VERSION}" for name in names), suite=SUITE_VERSION)
        if SHIPPED in names:
            return replace(found, demanded=tuple(name for name in names if name != SHIPPED))
        return replace(found, profiles={name: shipped.profiles[name] for name in names}, demanded=tuple(names))

    @staticmethod
    def of(pairs: Iterable[tuple[str, str]]) -> "MustPass":
        found: dict[str, list[str]] = {CORE: []}
        for profile, case in pairs:
            found.setdefault(profile, []).append(case)
        return MustPass({profile: tuple(dict.fromkeys(cases)) for profile, cases in found.items()})

    @staticmethod
    def read(path: Path) -> "MustPass":
        pairs = []
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if line.strip() and line[0] != "#":
                profile, _, case = line.strip().partition(" ")
                try:
                    pairs.append((profile, Case.parse(case).id))
                except CaseError as error:
                    raise InputError(f"{path}:{number}: expected 'PROFILE CASE_ID': {error}") from error
        if not pairs:
            raise InputError(f"{path}: expected lines 'PROFILE CASE_ID', got none")
        return MustPass.of(pairs)

    def to_text(self) -> str:
        head = f"# Must-pass list of suite {SUITE_VERSION}, written by `mla-conformance mustpass`.\n"
        return head + "".join(f"{profile} {case}\n" for profile, cases in self.profiles.items() for case in cases)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def core_roles(self) -> list[str]:
        """The roles that these profiles ask for anything, without which no certificate is given."""
        return list(dict.fromkeys(str(Case.parse(case).role) for name in _CORES for case in self.profiles[name]))

    def missing(self, records: Mapping[str, Record], waivable: bool = False) -> Iterator[tuple[str, str]]:
        """Cases of binding profiles that were not passed, each with why; ``waivable`` lets what is explained pass."""
        # The core binds a backend that has no role at all.
        refused = {case for case, record in records.items() if record.status is Status.UNSUPPORTED}
        binding = [p for p, cases in self.profiles.items() if p in self.demanded or not refused.issuperset(cases)]
        if not set(_CORES) & set(binding) and not self.demanded:
            binding.insert(0, CORE)
        for profile in binding:
            for case in self.profiles[profile]:
                status = records[case].status if case in records else None
                too_large = status is Status.UNAVAILABLE and CAPABILITIES[case.partition(":")[0]].large
                told = waivable and (too_large or status is Status.EXPECTED_FAILURE)
                if status is not Status.PASS and not told:
                    yield case, f"{profile}: {status or 'not in the report'}"


@dataclass(frozen=True)
class Required:
    name: str  # what reports call it
    reference: str  # as it was asked for
    digest: str = ""  # SHA-256 of the file; empty without one

    @staticmethod
    def asked(text: str) -> "Required":
        if text.startswith(hub.HUB):
            backend = references.parse_reference(text)
            return Required(backend.name, backend.reference)
        location, _, name = text.rpartition(":")
        digest = hashlib.sha256(read_bytes(Path(location))).hexdigest() if location.endswith(".py") else ""
        return Required(name, text, digest)

    def missing(self, reported: Sequence[BackendSummary]) -> str:
        """Why it does not count as judged by what reports hold under its name; empty if it does."""
        meant = [backend for backend in reported if self._is_named_by(backend.facts)]
        if not meant:
            others = dict.fromkeys(backend.facts.reference for backend in reported)
            return "in no report" + (f", where its name stands for {', '.join(others)}" if others else "")
        unjudged = (Status.UNSUPPORTED, Status.UNAVAILABLE)
        if all(record.status in unjudged for backend in meant for record in backend.records):
            reasons = dict.fromkeys(reason for backend in meant for reason in backend.reasons)
            return f"unavailable: {'; '.join(reasons)}" if reasons else "nothing of it was judged"
        digests = [backend.facts.fingerprint.removeprefix("file ") for backend in meant] if self.digest else []
        alike = all(len(each) >= 12 and self.digest.startswith(each) for each in digests)
        return "" if alike else "the judged file differs from the one here"

    def _is_named_by(self, facts: BackendFacts) -> bool:
        """A path may begin otherwise on the machine that judged."""
        if not self.digest:
            return facts.reference == self.reference
        location, _, name = facts.reference.rpartition(":")
        asked = Path(os.path.normpath(self.reference.rpartition(":")[0]))
        ends_alike = not asked.is_absolute() and Path(location).parts[-len(asked.parts) :] == asked.parts
        return name == self.name and (ends_alike or location == os.path.realpath(asked))
