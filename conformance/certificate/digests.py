"""Digests that tie a certificate to the cases, the judge and the reference that it was issued by."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.cases.case import Case, digest_of_id
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.driving.loaded import judging_sources
from mla_conformance.files.installed import meaning_digest
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.report.differences import differing
from mla_conformance.version import SUITE_VERSION, numbers_of
from mla_conformance.vocabulary import arrays, capabilities

LOCKED = ("judging", "reference")
"""Of the sources: another digest of these may judge alike, which a lock shows; those of cases and SPEC may not."""
# In ``suites.json``: how many cases a suite's list began with, which stand first in a record, in their order; and by
# module of this package that a kernel is reached through, digests that judge alike.
NUMBER, SOURCES = "listed", "sources"
FITTED = "fitted"  # of the spaces and of the cases that were fitted to a backend, a digest of its own


@cache
def installed_digests() -> dict[str, str]:
    return {
        "cases": _cases_digest(tuple(listed_ids())),
        # The tolerance table and the sources of judge and procedures, then those of the golden mathematics.
        "judging": meaning_digest(judging_sources()),
        "reference": meaning_digest(Path(str(files("mla_conformance.reference"))).glob("*.py")),
        "must_pass": MustPass.of_vocabulary().digest,
    }


def record_digests(fitted: Iterable[str]) -> dict[str, str]:
    """Those that a record holds: of what is installed, and of the spaces with the ids of cases fitted to its kernel."""
    return {**installed_digests(), FITTED: arrays.digest_of(fitted)}


def version_digests() -> dict[str, str | int | list[str]]:
    """What a new version of the suite stands for, as ``suites.json`` holds it; lists grow by ``ci/accept.py``.

    A list of cases that grows is pinned as it began: a line says itself that it was added.
    """
    here, first = installed_digests(), tuple(case.id for case in capabilities.first_cases())
    words = (files("mla_conformance") / "SPEC.md").read_text(encoding="utf-8").split()
    of_list: dict[str, str | int | list[str]] = {"cases": _cases_digest(first), NUMBER: len(first)}
    return {**of_list, "spec": meaning_digest((), *words), **{name: [here[name]] for name in LOCKED}}


def locked_digests() -> dict[str, tuple[str, ...]]:
    return {name: tuple(_stored().get(name, ())) for name in LOCKED}


def listed_sources() -> dict[str, list[str]]:
    return dict(_stored().get(SOURCES, {}))


@cache
def _stored(suite: str = SUITE_VERSION) -> dict[str, Any]:
    stored = json.loads((files("mla_conformance.fixtures") / "suites.json").read_text(encoding="utf-8"))
    return dict(stored.get(suite, {}))


def judged_list(certificate: Certificate) -> Set[str]:
    """The ids of the list that a record was judged on: its suite's, with what its version or an earlier one added.

    A later version's cases are in it if it holds them: they may stand in a checkout before it is released.
    """
    if own := own_list(certificate):
        return own
    began, then = capabilities.first_cases(), numbers_of(certificate.version)
    added = capabilities.added_cases().items()
    had = (case for case, since in added if since <= then or case.id in certificate.cases)
    return dict.fromkeys(case.id for case in (*began, *had)).keys()


def own_list(certificate: Certificate) -> Set[str] | None:
    """Of a record of an earlier suite, the ids of its list and of what was added to it; None if it lacks any."""
    stored, ids = _stored(certificate.suite), tuple(certificate.cases)
    if certificate.is_current or NUMBER not in stored:
        return None
    began, others = ids[: stored[NUMBER]], ids[stored[NUMBER] :]
    # Beside the list a record holds cases that were fitted to its kernel, all of them of an array's capability.
    added = sorted(id for id in others if id.partition(":")[0] not in arrays.SPACES)
    return dict.fromkeys((*began, *added)).keys() if _cases_digest(began) == stored["cases"] else None


@cache
def listed_ids() -> Set[str]:
    every = (*capabilities.first_cases(), *capabilities.added_cases())
    return dict.fromkeys(case.id for case in every).keys()


def unlike(certificate: Certificate) -> Iterator[tuple[str, str | None, str | None]]:
    """What is otherwise here, by name: the digest here, and the stated one, unless its suite lists that as alike."""
    among, here = judged_list(certificate), installed_digests()
    if among != listed_ids():
        here = here | {
            "cases": _cases_digest(tuple(among)),
            "must_pass": MustPass.of_cases(tuple(map(Case.parse, among))).digest,
        }
    # The digest of what must pass names its suite; the cases decide what that is.
    passed_over = {FITTED} if certificate.is_current else {FITTED, "must_pass"}
    here, stated = ({n: x for n, x in each.items() if n not in passed_over} for each in (here, certificate.digests))
    for name, ours, theirs in sorted(differing(here, stated), key=lambda each: each[0]):
        # Of an earlier suite nothing says that the sources here judge like its own.
        among_alike = {ours, theirs} if certificate.is_current else {theirs}
        if name not in LOCKED or not among_alike <= set(_stored(certificate.suite).get(name, ())):
            yield name, ours, theirs


@lru_cache(maxsize=8)
def _cases_digest(ids: Sequence[str]) -> str:
    return meaning_digest((), "\n".join(digest_of_id(id) + id for id in ids))


def seal(certificate: Certificate) -> str:
    """SHA-256 of a certificate's content, which notices a change by accident or by hand."""
    content = msgspec.json.encode(msgspec.structs.replace(certificate, seal=""), order="deterministic")
    return hashlib.sha256(content).hexdigest()
