"""Issuing a certificate: only for a complete, unfiltered run of the full tier by one real kernel."""

import datetime
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from mla_conformance.certificate.certificate import Certificate, Finding, Unjudged, Worst
from mla_conformance.certificate.digests import listed_ids, record_digests, seal
from mla_conformance.certificate.pins import Pins
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import BackendFacts, Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import DeviationForm
from mla_conformance.report.summary import RunSummary
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.capabilities import Tier


class Refused(Exception):
    """No certificate, and why."""


def require_certifiable(backends: Sequence[BackendFacts], cases: Collection[str], drawn: bool = False) -> None:
    """Refuse a run that could not be certified whatever it found, before anything of it is launched."""
    if len(backends) != 1:
        raise Refused(f"a certificate is of one backend: expected one --backend, got {len(backends)}")
    listed = listed_ids()
    for what, odd in (("are left out", listed - set(cases)), ("are not of the full tier", set(cases) - listed)):
        if odd:
            raise Refused(
                f"{len(odd)} cases {what}, for example {min(odd)}; expected the full tier, no selection and no shard"
            )
    if drawn:
        raise Refused("drawn cases are in no list; certify without --explore")
    (backend,) = backends
    if backend.reasons:
        raise Refused(f"{backend.name} is unavailable: {'; '.join(backend.reasons)}")
    if backend.emulated:
        raise Refused(f"{backend.name} is an emulated kernel, which is judged but never certified")


def require_core(backend: BackendFacts) -> None:
    roles = MustPass.of_suite().core_roles
    if backend.declared.keys().isdisjoint(roles):
        own, needed = ", ".join(backend.declared), " or ".join(roles)
        raise Refused(f"{backend.name} is {own}, a certificate needs {needed}; use --record FILE")


def committed(pins: Pins) -> Pins:
    """The pins; a backend is refused of which a package is a checkout with changes, which not everybody can have."""
    for name, pin in pins.installed.items():
        if pin.clean is False:
            raise Refused(f"package {name} is a checkout with changes, which no commit names; commit them first")
    return pins


def record(
    run: RunSummary,
    today: datetime.date,
    pins: Pins,
    libraries: Mapping[str, str] = MappingProxyType({}),
    certifies: bool = False,
) -> Certificate:
    """The record of a run; refused if it is incomplete, or something failed without an expectation.

    It is a certificate if no must-pass case is lacking and every claimed pair was judged, or else refused.
    """
    (backend,) = run.backends
    for capability in backend.capabilities:
        if capability.counts.not_run:
            raise Refused(f"incomplete: {capability.counts.not_run} cases of {capability.name} were not run")
        if capability.failures:
            first = capability.failures[0]
            raise Refused(f"{len(capability.failures)} failures of {capability.name}, first: {first.case}")
        if capability.counts.unavailable and not (capability.counts.passed or capability.counts.waived):
            raise Refused(f"no case of {capability.name} could be judged here: {capability.records[0].message}")
    passed = [record for record in backend.records if record.status is Status.PASS]
    worst: dict[str, Worst] = {}
    for rule in sorted({rule for record in passed for rule in record.used}):  # of the error budget
        most = max(passed, key=lambda record: record.shares.get(rule, 0.0))
        worst[rule] = Worst(round(most.shares[rule], 4), most.case)
    found = Certificate(
        suite=SUITE_VERSION,
        version=__version__,
        tier=Tier.FULL.value,
        date=today.isoformat(),
        backend=backend.name,
        reference=backend.facts.reference,
        device=run.environment["device"],
        environment=run.environment,
        pins=pins,
        rounding=backend.facts.rounding,
        deviations=tuple(DeviationForm(library=theirs, adapter=ours) for theirs, ours in backend.facts.deviations),
        evidence=tuple(backend.evidence),
        traced=backend.traced.joined(Traced(libraries=dict(libraries))),
        digests=record_digests(backend.facts.fitted),
        counts=backend.counts,
        worst=worst,
        seconds=round(sum(record.seconds for record in backend.records), 1),
        findings=tuple(
            Finding(r.case, r.judged, r.check, r.message, r.expectation, r.explanation)
            for r in backend.records
            if r.status is Status.EXPECTED_FAILURE
        ),
        unjudged=tuple(Unjudged(r.case, r.message) for r in backend.records if r.status is Status.UNAVAILABLE),
        lacking=dict(MustPass.of_suite().missing({r.case: r for r in backend.records}, waivable=True)),
        cases={record.case: record.status for record in backend.records},
        traits=backend.traits or msgspec.UNSET,
        speed=backend.speed or msgspec.UNSET,
    )
    for role, pairs in backend.pairs.items() if certifies else ():
        if missing := pairs.not_judged:
            raise Refused(f"{len(missing)} pairs that it claims of {role} were not judged: {missing[0]}")
    for case, why in found.lacking.items() if certifies else ():
        raise Refused(f"must-pass case {case} did not pass: {why}; --record FILE takes it with what it lacks")
    return msgspec.structs.replace(found, seal=seal(found))
