"""Backends that have to be judged, and whether what a report calls by such a name is the one that is meant."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.inputs import read_bytes
from mla_conformance.judging.record import BackendFacts
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary

_UNJUDGED = (Status.UNSUPPORTED, Status.UNAVAILABLE)
_SHORTEST_DIGEST = 12


@dataclass(frozen=True)
class Required:
    """A backend that has to be judged: a registered one, a class of a package, or a file by its path and its bytes."""

    name: str  # what reports call it
    reference: str  # as it was asked for
    digest: str = ""  # SHA-256 of the file; empty without one

    @staticmethod
    def asked(text: str) -> "Required":
        """What an option names."""
        location, _, name = text.rpartition(":")
        digest = hashlib.sha256(read_bytes(Path(location))).hexdigest() if location.endswith(".py") else ""
        return Required(name, text, digest)

    def missing(self, reported: Sequence[BackendSummary]) -> str:
        """Why it does not count as judged by what reports hold under its name; empty if it does."""
        meant = [backend for backend in reported if self._is_named_by(backend.facts)]
        if not meant:
            others = dict.fromkeys(backend.facts.reference for backend in reported)
            return "in no report" + (f", where its name stands for {', '.join(others)}" if others else "")
        if reason := _unjudged(meant):
            return reason
        altered = not all(self._is_pinned_by(backend.facts) for backend in meant)
        return "the judged file differs from the one here" if altered else ""

    def _is_named_by(self, facts: BackendFacts) -> bool:
        """A path may begin otherwise on the machine that judged."""
        if not self.digest:
            return facts.reference == self.reference
        location, _, name = facts.reference.rpartition(":")
        asked = Path(os.path.normpath(self.reference.rpartition(":")[0]))
        ends_alike = not asked.is_absolute() and Path(location).parts[-len(asked.parts) :] == asked.parts
        return name == self.name and (ends_alike or location == os.path.realpath(asked))

    def _is_pinned_by(self, facts: BackendFacts) -> bool:
        digest = facts.fingerprint.removeprefix("file ")
        return not self.digest or (len(digest) >= _SHORTEST_DIGEST and self.digest.startswith(digest))


def _unjudged(parts: Sequence[BackendSummary]) -> str:
    """Why a backend does not count as judged; empty if it does."""
    if any(record.status not in _UNJUDGED for backend in parts for record in backend.records):
        return ""
    reasons = dict.fromkeys(reason for backend in parts for reason in backend.reasons)
    return f"unavailable: {'; '.join(reasons)}" if reasons else "nothing of it was judged"
