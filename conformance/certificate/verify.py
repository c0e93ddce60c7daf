"""What a record is issued by, and whether it holds: digests and list, its arithmetic, what it says of failures.

One is issued only for a complete, unfiltered run of the full tier by one real kernel.
"""

import datetime
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.backends.references import BackendReferenceError, known_backends, known_variants
from mla_conformance.cases.case import SESSIONS, Case, digest_of_id
from mla_conformance.certificate.certificate import Certificate, Finding, Unjudged, Worst, records_of
from mla_conformance.certificate.pins import Pins
from mla_conformance.driving.loaded import judging_sources
from mla_conformance.files.installed import meaning_digest
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import COMPARED, BackendFacts, Status, Traced
from mla_conformance.report import differences, json_report, outcome, summary
from mla_conformance.version import SUITE_VERSION, __version__, numbers_of
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
        "cases": cases_digest(tuple(listed_ids())),
        # The tolerance table and the sources of judge and procedures, then those of the golden mathematics.
        "judging": meaning_digest(judging_sources()),
        "reference": meaning_digest(Path(str(files("mla_conformance.reference"))).glob("*.py")),
        "must_pass": MustPass.of_vocabulary().digest,
    }


def record_digests(fitted: Iterable[str]) -> dict[str, str]:
    """Those that a record holds: of what is installed, and of the spaces with the ids of cases fitted to its kernel."""
    return {**installed_digests(), FITTED: arrays.digest_of(fitted)}


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
    had = [case.id for case, since in added if since <= then or case.id in certificate.cases]
    had += [case.id for case, (since, until) in capabilities.withdrawn_cases().items() if since <= then < until]
    return dict.fromkeys((*(case.id for case in began), *sorted(had))).keys()


def own_list(certificate: Certificate) -> Set[str] | None:
    """Of a record of an earlier suite, the ids of its list and of what was added to it; None if it lacks any."""
    stored, ids = _stored(certificate.suite), tuple(certificate.cases)
    if certificate.is_current or NUMBER not in stored:
        return None
    began, others = ids[: stored[NUMBER]], ids[stored[NUMBER] :]
    # Behind what was added stand cases that were fitted to the kernel, all of them sessions or of an array.
    asked, fitted = [id.partition(":")[0] for id in others], {*arrays.SPACES, SESSIONS}
    last = max((number for number, name in enumerate(asked) if name not in fitted), default=-1)
    added = sorted(others[number] for number in range(last + 1) if asked[number] not in arrays.SPACES)
    return dict.fromkeys((*began, *added)).keys() if cases_digest(began) == stored["cases"] else None


@cache
def listed_ids() -> Set[str]:
    return dict.fromkeys(case.id for case in (*capabilities.first_cases(), *capabilities.added_cases())).keys()


def unlike(certificate: Certificate) -> Iterator[tuple[str, str | None, str | None]]:
    """What is otherwise here, by name: the digest here, and the stated one, unless its suite lists that as alike."""
    among, here = judged_list(certificate), installed_digests()
    if among != listed_ids():
        must_pass = MustPass.of_cases(tuple(map(Case.parse, among)))
        here = here | {"cases": cases_digest(tuple(among)), "must_pass": must_pass.digest}
    # The digest of what must pass names its suite; the cases decide what that is.
    passed_over = {FITTED} if certificate.is_current else {FITTED, "must_pass"}
    here, stated = ({n: x for n, x in each.items() if n not in passed_over} for each in (here, certificate.digests))
    for name, ours, theirs in sorted(differences.differing(here, stated), key=lambda each: each[0]):
        # Of an earlier suite nothing says that the sources here judge like its own.
        among_alike = {ours, theirs} if certificate.is_current else {theirs}
        if name not in LOCKED or not among_alike <= set(_stored(certificate.suite).get(name, ())):
            yield name, ours, theirs


@lru_cache(maxsize=8)
def cases_digest(ids: Sequence[str]) -> str:
    return meaning_digest((), "\n".join(digest_of_id(id) + id for id in ids))


def seal(certificate: Certificate) -> str:
    """SHA-256 of a certificate's content, which notices a change by accident or by hand."""
    content = msgspec.json.encode(msgspec.structs.replace(certificate, seal=""), order="deterministic")
    return hashlib.sha256(content).hexdigest()


class Refused(Exception):
    """No certificate, and why."""


def require_whole(backends: int, cases: Collection[str], drawn: bool = False) -> None:
    """Refuse a run of so many backends and these cases that could not be certified whatever it found."""
    if backends != 1:
        raise Refused(f"a certificate is of one backend: expected one --backend, got {backends}")
    listed = listed_ids()
    for what, odd in (("are left out", listed - set(cases)), ("are not of the full tier", set(cases) - listed)):
        if odd:
            wanted = "expected the full tier, no selection and no shard"
            raise Refused(f"{len(odd)} cases {what}, for example {min(odd)}; {wanted}")
    if drawn:
        raise Refused("drawn cases are in no list; certify without --explore")


def require_real(backend: BackendFacts, certifies: bool = False) -> None:
    """Refuse what cannot be recorded, or certified, by what is said of it, before anything of it is launched."""
    if backend.reasons:
        raise Refused(f"{backend.name} is unavailable: {'; '.join(backend.reasons)}")
    if backend.emulated:
        raise Refused(f"{backend.name} is an emulated kernel, which is judged but never certified")
    roles = MustPass.of_suite().core_roles
    if certifies and backend.declared.keys().isdisjoint(roles):
        own, needed = ", ".join(backend.declared), " or ".join(roles)
        raise Refused(f"{backend.name} is {own}, a certificate needs {needed}; use --record FILE")


def committed(pins: Pins) -> Pins:
    """The pins; a backend is refused of which a package is a checkout with changes, which not everybody can have."""
    for name, pin in pins.installed.items():
        if pin.clean is False:
            raise Refused(f"package {name} is a checkout with changes, which no commit names; commit them first")
    return pins


def record(
    run: summary.RunSummary, today: datetime.date, pins: Pins, loaded: Mapping[str, str] = {}, certifies: bool = False
) -> Certificate:
    """The record of a run; refused if it is incomplete, or something failed without an expectation.

    It is a certificate if no must-pass case is lacking and every claimed pair was judged, or else refused.
    """
    (backend,) = run.backends
    facts = backend.facts
    for capability in backend.capabilities:
        if capability.counts.not_run:
            raise Refused(f"incomplete: {capability.counts.not_run} cases of {capability.name} were not run")
        if capability.failures:
            first = capability.failures[0]
            raise Refused(f"{len(capability.failures)} failures of {capability.name}, first: {first.case}")
        if capability.counts.unavailable and not (capability.counts.passed or capability.counts.waived):
            raise Refused(f"no case of {capability.name} could be judged here: {capability.records[0].message}")
    if backend.only_refuses:
        raise Refused(f"{backend.name} is {outcome.refusing(backend)}")
    passed = [record for record in backend.records if record.status is Status.PASS]
    worst: dict[str, Worst] = {}
    for rule in sorted({rule for record in passed for rule in record.used}):  # of the error budget
        most = max(passed, key=lambda record: record.shares.get(rule, 0.0))
        worst[rule] = Worst(round(most.shares[rule], 4), most.case)
    waived = (record for record in backend.records if record.status is Status.EXPECTED_FAILURE)
    found = Certificate(
        suite=SUITE_VERSION, version=__version__, tier=capabilities.Tier.FULL.value, date=today.isoformat(),
        backend=backend.name, reference=facts.reference, pins=pins, rounding=facts.rounding,
        device=run.environment["device"], environment=run.environment, digests=record_digests(facts.fitted),
        deviations=tuple(json_report.DeviationForm(library=theirs, adapter=ours) for theirs, ours in facts.deviations),
        evidence=tuple(backend.evidence), traced=backend.traced.joined(Traced(libraries=dict(loaded))),
        counts=backend.counts, worst=worst, seconds=round(sum(record.seconds for record in backend.records), 1),
        findings=tuple(Finding(r.case, r.judged, r.check, r.message, r.expectation, r.explanation) for r in waived),
        unjudged=tuple(Unjudged(r.case, r.message) for r in backend.records if r.status is Status.UNAVAILABLE),
        lacking=dict(MustPass.of_suite().missing({r.case: r for r in backend.records}, waivable=True)),
        cases={record.case: record.status for record in backend.records},
        traits=backend.traits or msgspec.UNSET, speed=backend.speed or msgspec.UNSET,
    )  # fmt: skip
    for role, pairs in backend.pairs.items() if certifies else ():
        if missing := pairs.not_judged:
            raise Refused(f"{len(missing)} pairs that it claims of {role} were not judged: {missing[0]}")
    for case, why in found.lacking.items() if certifies else ():
        raise Refused(f"must-pass case {case} did not pass: {why}; --record FILE takes it with what it lacks")
    return msgspec.structs.replace(found, seal=seal(found))


def problems(certificate: Certificate, today: datetime.date) -> list[str]:
    found = []
    if certificate.seal != seal(certificate):
        found.append("the seal does not fit the content: it was changed after it was issued")
    if unknown := age(certificate):
        return [*found, unknown]
    for check in (_digests_and_cases, _verdicts, _findings, _real_kernel):
        found += check(certificate)
    stated = certificate.environment.get("device"), certificate.environment.get("suite")
    if stated != (certificate.device, certificate.suite):
        found.append(f"the environment names device and suite {stated}, the certificate of {certificate.device}")
    try:
        if datetime.date.fromisoformat(certificate.date) > today:
            found.append(f"date {certificate.date} lies in the future")
    except ValueError:
        found.append(f"date {certificate.date!r}: expected YYYY-MM-DD")
    return found


def age(certificate: Certificate) -> str:
    if certificate.is_current or own_list(certificate) is not None:
        return ""
    outdated = f"of suite {certificate.suite}, outdated by {SUITE_VERSION}, which is installed here"
    return f"{outdated}; renew it: {certificate.renewal}"


def _digests_and_cases(certificate: Certificate) -> Iterator[str]:
    for name, here, stated in unlike(certificate):
        todo = ""
        if not certificate.is_current:
            todo = f", which suite {certificate.suite} does not list"
        elif name in LOCKED and here in locked_digests()[name]:
            # The stated one is not listed, or else that of here.
            todo = f", which suite {SUITE_VERSION} does not list; renew the record: {certificate.renewal}"
        elif name in LOCKED:
            sources = f"suite {SUITE_VERSION} does not list the sources that are here"
            todo = f"; {sources}; to show that they judge alike: python ci/lock.py write, then python ci/accept.py"
        yield f"digest '{name}': expected {here} as installed here, got {stated}{todo}"
    if certificate.tier != capabilities.Tier.FULL:
        yield f"tier {certificate.tier}: only the full tier is certified"
    listed = judged_list(certificate)
    fitted = sorted(certificate.cases.keys() - listed)
    foreign = {case for case in fitted if not arrays.could_be_fitted(case)}
    for what, odd in (("missing", listed - certificate.cases.keys()), ("not in the suite's list", foreign)):
        if odd:
            yield f"{len(odd)} cases are {what}, for example {min(odd)}"
    digest = arrays.digest_of(fitted, None if listed == listed_ids() else listed)
    if not foreign and certificate.digests.get(FITTED) != digest:
        yield f"the {len(fitted)} fitted cases are not those that were issued: their digest differs"


def _verdicts(certificate: Certificate) -> Iterator[str]:
    listed = judged_list(certificate)
    records = {each.case: each for each in records_of(certificate.backend, certificate.backend, certificate.cases)}
    counted = summary.Counts.of(records.values(), len(listed | certificate.cases.keys()))
    for name, expected, stated in differences.differing(*map(msgspec.structs.asdict, (counted, certificate.counts))):
        yield f"count '{name}': the cases give {expected}, the certificate says {stated}"
    failed = [case for case, record in records.items() if record.failed]
    if failed:
        yield f"{len(failed)} cases failed, which no certificate is issued for, for example {failed[0]}"
    required = MustPass.of_suite() if listed == listed_ids() else MustPass.of_cases(tuple(map(Case.parse, listed)))
    missing = dict(required.missing(records, waivable=True))
    # Profiles depend on what a case of an array takes, which an earlier suite estimated otherwise.
    refused = {id for id in missing if id in records and records[id].status is Status.UNSUPPORTED}
    unbound = set() if certificate.is_current else {id for id in refused if id.partition(":")[0] in arrays.SPACES}
    undecided = [case for case in missing if case not in {*certificate.lacking, *unbound}]
    if undecided:
        yield f"{len(undecided)} must-pass cases did not pass, for example {undecided[0]} ({missing[undecided[0]]})"
    for case in sorted(certificate.lacking.keys() - missing.keys()):
        if certificate.is_current or case not in records or records[case].status is Status.PASS:
            yield f"must-pass case {case} is listed as missing, but passed"


def _findings(certificate: Certificate) -> Iterator[str]:
    waived = {case for case, status in certificate.cases.items() if status is Status.EXPECTED_FAILURE}
    found = {finding.case: finding for finding in certificate.findings}
    yield from (f"case {case} is waived, but no finding says why" for case in sorted(waived - found.keys()))
    for case in sorted(found):
        if case not in waived:
            yield f"a finding waives {case}, which is not waived among the cases"
        elif not found[case].expectation:
            yield f"the finding on {case} gives no reason"
    # A run explains a kernel's wrong numbers, or says why it does not; older records are silent about all.
    for each in certificate.findings:
        if each.status is Status.FAIL and each.check in COMPARED and each.explanation == "":
            yield f"the finding on {each.case} is a wrong number, and nothing says what it looks like"
    unjudged = {case for case, status in certificate.cases.items() if status is Status.UNAVAILABLE}
    for case in sorted(unjudged - {entry.case for entry in certificate.unjudged if entry.reason}):
        yield f"case {case} could not be judged, and nothing says why"


def _real_kernel(certificate: Certificate) -> Iterator[str]:
    from mla_conformance.backends.declaration import declaration_of  # torch, which a refused command does without
    from mla_conformance.backends.loading import load_backend

    for reference in (*known_backends(), *known_variants()):
        with suppress(ImportError, BackendReferenceError):
            if reference.name == certificate.backend and declaration_of(load_backend(reference)).emulated:
                yield f"backend {reference.name} is an emulated kernel, which is never certified"
