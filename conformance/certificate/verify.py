"""Verifying a certificate, giving its failures reasons that were found after the run, and running cases again."""

import datetime
import random
from collections.abc import Iterator, Set

import msgspec

from mla_conformance.backends import declaration, loading, references
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.certificate import digests
from mla_conformance.certificate.certificate import Certificate, records_of, renewal
from mla_conformance.certificate.pins import Remark, Weight, compare_loaded, compare_machines
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import passing_run
from mla_conformance.engine.supervisor import RunError
from mla_conformance.expectations.apply import Expectations
from mla_conformance.files.whole import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import COMPARED, Status
from mla_conformance.report.differences import contradicts, differing
from mla_conformance.report.summary import Counts, RunSummary
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary import arrays, capabilities


def problems(certificate: Certificate, today: datetime.date) -> list[str]:
    found = []
    if certificate.seal != digests.seal(certificate):
        found.append("the seal does not fit the content: it was changed after it was issued")
    if unknown := age(certificate):
        return [*found, unknown]
    for check in (_digests, _cases, _verdicts, _findings, _real_kernel):
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
    if certificate.is_current or digests.own_list(certificate) is not None:
        return ""
    renew = f"renew it: {renewal(certificate.reference, certificate.device)}"
    return f"of suite {certificate.suite}, outdated by {SUITE_VERSION}, which is installed here; {renew}"


def _digests(certificate: Certificate) -> Iterator[str]:
    for name, here, stated in digests.unlike(certificate):
        todo = ""
        if not certificate.is_current:
            todo = f", which suite {certificate.suite} does not list"
        elif name in digests.LOCKED and here in digests.locked_digests()[name]:
            # The stated one is not listed, or else that of here.
            renew = renewal(certificate.reference, certificate.device)
            todo = f", which suite {SUITE_VERSION} does not list; renew the record: {renew}"
        elif name in digests.LOCKED:
            sources = f"suite {SUITE_VERSION} does not list the sources that are here"
            todo = f"; {sources}; to show that they judge alike: python ci/lock.py write, then python ci/accept.py"
        yield f"digest '{name}': expected {here} as installed here, got {stated}{todo}"
    if certificate.tier != capabilities.Tier.FULL:
        yield f"tier {certificate.tier}: only the full tier is certified"


def _cases(certificate: Certificate) -> Iterator[str]:
    listed = digests.judged_list(certificate)
    fitted = sorted(certificate.cases.keys() - listed)
    foreign = {case for case in fitted if not arrays.could_be_fitted(case)}
    for what, odd in (("missing", listed - certificate.cases.keys()), ("not in the suite's list", foreign)):
        if odd:
            yield f"{len(odd)} cases are {what}, for example {min(odd)}"
    digest = arrays.digest_of(fitted, None if listed == digests.listed_ids() else listed)
    if not foreign and certificate.digests.get(digests.FITTED) != digest:
        yield f"the {len(fitted)} fitted cases are not those that were issued: their digest differs"


def not_yet_judged(certificate: Certificate) -> Set[str]:
    return digests.listed_ids() - digests.judged_list(certificate)


def _verdicts(certificate: Certificate) -> Iterator[str]:
    listed = digests.judged_list(certificate)
    records = {each.case: each for each in records_of(certificate.backend, certificate.backend, certificate.cases)}
    counted = Counts.of(records.values(), len(listed | certificate.cases.keys()))
    for name, expected, stated in differing(*map(msgspec.structs.asdict, (counted, certificate.counts))):
        yield f"count '{name}': the cases give {expected}, the certificate says {stated}"
    failed = [case for case, record in records.items() if record.failed]
    if failed:
        yield f"{len(failed)} cases failed, which no certificate is issued for, for example {failed[0]}"
    required = (
        MustPass.of_suite() if listed == digests.listed_ids() else MustPass.of_cases(tuple(map(Case.parse, listed)))
    )
    missing = dict(required.missing(records, waivable=True))
    undecided = [case for case in missing if case not in certificate.lacking]
    if undecided:
        yield f"{len(undecided)} must-pass cases did not pass, for example {undecided[0]} ({missing[undecided[0]]})"
    for case in sorted(certificate.lacking.keys() - missing.keys()):
        # An earlier suite's profiles, which bind kernels, were others.
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
    for reference in (*references.known_backends(), *references.known_variants()):
        if reference.name == certificate.backend:
            try:
                emulated = declaration.declaration_of(loading.load_backend(reference)).emulated
            except (ImportError, references.BackendReferenceError):
                return
            if emulated:
                yield f"backend {reference.name} is an emulated kernel, which is never certified"


def with_reasons(certificate: Certificate, expectations: Expectations, today: datetime.date) -> Certificate:
    """The same record, which has to verify; each failure of it says what these expectations, which foresee it, say."""
    if wrong := problems(certificate, today):
        raise InputError(f"{certificate.backend}: expected a record that verifies; {wrong[0]}")
    known, findings = {**certificate.pins.versions, **certificate.environment}, []
    for finding in certificate.findings:
        status, capability = finding.status or Status.FAIL, finding.case.partition(":")[0]
        failed = Record(certificate.backend, certificate.reference, capability, finding.case, status)
        seen = expectations.apply(failed.with_fields(check=finding.check, message=finding.message), known)
        if seen.status is not Status.EXPECTED_FAILURE:
            raise InputError(
                f"{certificate.backend}: expected an entry for {finding.status} of {finding.case}, got none; "
                "write it into a folder of --expectations"
            )
        findings.append(msgspec.structs.replace(finding, expectation=seen.expectation))
    changed = msgspec.structs.replace(certificate, findings=tuple(findings))
    return msgspec.structs.replace(changed, seal=digests.seal(changed))


def rerun(
    certificate: Certificate, number: int, backend: references.BackendReference, device: str | None, salt: str
) -> Iterator[Remark]:
    judged = judged_cases(certificate)
    cases = random.SystemRandom().sample(judged, min(number, len(judged)))
    try:
        summary = _run(RunRequest.of([backend.reference], device=device, cases=cases, salt=salt))
    except (InputError, CaseError, RunError) as error:
        raise InputError(f"cannot run the cases again: {error}") from error
    yield from compare_machines(certificate.environment, summary.environment)
    yield from compare_loaded(certificate.traced, summary.backends[0].traced)
    found = {record.case: record for record in summary.records}
    for case in cases:
        stated = certificate.cases[case]
        said = f"case {case}: the certificate says {stated}, run again it gives"
        if case not in found:
            yield Remark(Weight.AGAINST, f"{said} no verdict")
            continue
        now = found[case]
        gives = f"{now.status}: {now.message}; {now.replay}" if now.failed else now.status.value
        if contradicts(stated, now.status):
            # A known failure may need its own inputs to show.
            excused = stated is Status.EXPECTED_FAILURE and salt != certificate.salt
            yield Remark(Weight.REPORTED if excused else Weight.AGAINST, f"{said} {gives}")
        elif now.status is Status.UNAVAILABLE:  # another device's memory is nothing against a kernel
            yield Remark(Weight.REPORTED, f"{said} {gives}")


def _run(request: RunRequest) -> RunSummary:
    with passing_run(request) as run, run:
        run.prepare()
        if reasons := run.facts[0].reasons:
            raise InputError("; ".join(reasons))
        run.begin()
        run.judge()
        run.finish()
    return run.summary()


def judged_cases(certificate: Certificate) -> list[str]:
    judged = (Status.PASS, Status.EXPECTED_FAILURE)
    return sorted(case for case, status in certificate.cases.items() if status in judged)
