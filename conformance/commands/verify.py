"""Records beside what is installed here and some of their cases run again, and with reasons found since."""

import argparse
import datetime
import random
import secrets
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.cases.case import CaseError
from mla_conformance.certificate.certificate import Certificate, Outdated, checked, read_certificate, signature_of
from mla_conformance.certificate.pins import Remark, Weight, compare, compare_loaded, compare_machines
from mla_conformance.certificate.records import KeptRecord, change_records, is_records, read_records, sanitized_problems
from mla_conformance.certificate.verify import judged_list, listed_ids, listed_sources, problems, seal, unlike
from mla_conformance.engine.machine import this_machine
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import passing_run
from mla_conformance.engine.supervisor import RunError
from mla_conformance.expectations import KNOWN_FAILURES, Expectations
from mla_conformance.files.installed import git_asked_before
from mla_conformance.files.whole import InputError, read_text, write_output
from mla_conformance.judging.record import Record, Status
from mla_conformance.report import differences, json_report
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import say
from mla_conformance.version import SUITE_VERSION


def verify(options: argparse.Namespace) -> int:
    with git_asked_before() if options.rerun > 0 else nullcontext():
        return max([status for path in options.certificates for status in _statuses(path, options)])


def write_reasons(options: argparse.Namespace) -> int:
    known, today = Expectations.load([KNOWN_FAILURES, *options.expectations]), datetime.date.today()

    def explained(kept: KeptRecord) -> KeptRecord:
        before, after = kept.certificate, with_reasons(kept.certificate, known, today)
        changed = sum(one != other for one, other in zip(before.findings, after.findings, strict=True))
        said = f"{changed} of {len(after.findings)} failures have another reason than before"
        say(f"{before.backend} on {before.device}: {said}")
        return replace(kept, certificate=after, signature="") if changed else kept

    for path in options.records:
        if is_records(path):
            change_records(path, lambda records: list(map(explained, records)))
        elif (after := explained(before := KeptRecord(read_certificate(path)))) is not before:
            write_output(path, json_report.to_text(after.certificate))
            signature_of(path).unlink(missing_ok=True)
    return 0


def _statuses(path: Path, options: argparse.Namespace) -> Iterator[int]:
    if not is_records(path):
        try:
            kept, beside = KeptRecord(read_certificate(path)), signature_of(path)
            signature = read_text(beside) if beside.is_file() else None
            yield _verify(str(path), kept, (read_text(path), signature, beside.name), options)
        except Outdated as old:
            say(str(old), error=True)
            yield 1
        return
    lines = read_records(path)
    if options.backend:
        wanted = parse_reference(options.backend).name
        lines = [line for line in lines if line.kept and line.kept.certificate.backend == wanted]
        if not lines:
            raise InputError(f"{path}: expected a record of {wanted}, got none")
    for line in lines:
        if line.kept is None:
            say(line.why, error=True)
            yield 2
            continue
        try:
            signed = line.kept.certificate.seal, line.kept.signature or None, "signature"
            yield _verify(line.source, line.kept, signed, options)
        except InputError as error:
            say(f"{line.source}: {error}", error=True)
            yield 2


def _verify(source: str, kept: KeptRecord, signed: tuple[str, str | None, str], options: argparse.Namespace) -> int:
    """Say what speaks against a record; ``signed`` has a content, its signature, and that one's name."""
    certificate, again = kept.certificate, options.rerun > 0
    salt = secrets.token_hex(8) if options.salt is None else options.salt
    against, reported = list[str](), list[str]()

    def take(remarks: Iterable[Remark]) -> None:
        for weight, sentence in remarks:
            if weight is Weight.AGAINST or (weight is Weight.OTHER_BUILD and again):
                against.append(sentence)
            else:
                inherits = ", not of what is installed here" if weight is Weight.OTHER_BUILD else ""
                reported.append(sentence + inherits)

    against += problems(certificate, datetime.date.today())
    against += sanitized_problems(certificate, kept.sanitized)
    content, signature, name = signed
    if options.signers is not None:
        take([checked(content, signature, name, options.signers)])
    elif signature is not None:
        take([Remark(Weight.REPORTED, f"{name} was not checked; add --signers FILE")])
    if new := listed_ids() - judged_list(certificate):
        reported.append(f"{len(new)} cases of the suite's list are not yet judged, for example {min(new)}")
    if certificate.is_current:
        take(_beside_this_machine(certificate, options))
    elif again and not against:
        wanted = f"expected a record of suite {SUITE_VERSION}, which is installed here, to run again"
        against.append(f"{wanted}; renew: {certificate.renewal}")
    if again and not against:
        reference = parse_reference(options.backend or certificate.reference).reference
        take(rerun(certificate, options.rerun, reference, options.device, salt))
    say(*(f"{source}: {sentence}" for sentence in reported))
    if against:
        say(*(f"{source}: {sentence}" for sentence in against), error=True)
        return 1
    counts, judged_again = certificate.counts, min(options.rerun, len(judged_cases(certificate)))
    waived = f", {counts.waived} known to fail" if counts.waived else ""
    run = f" · {judged_again} run again" + (f" with salt {salt}" if salt else "") if judged_again > 0 else ""
    lacking = f" · no certificate: {len(certificate.lacking)} must-pass cases missing" if certificate.lacking else ""
    subject = f"{certificate.backend} on {certificate.device}, suite {certificate.suite}"
    say(f"{source}: {subject}: {counts.passed} of {counts.listed} passed{waived} · holds{run}{lacking}")
    return 0


def _beside_this_machine(certificate: Certificate, options: argparse.Namespace) -> Iterator[Remark]:
    try:
        backend = parse_reference(options.backend or certificate.reference)
    except BackendReferenceError as error:
        if options.backend or options.rerun > 0:
            raise InputError(str(error)) from error
        yield Remark(Weight.REPORTED, f"the backend was not compared: {error}")
        return
    if backend.name != certificate.backend:
        raise InputError(f"expected the certificate's backend, {certificate.backend}, got {backend.name}")
    if options.rerun <= 0:  # the run tells more
        yield from compare_machines(certificate.environment, this_machine())
    pins, traced, judged_alike = certificate.pins, certificate.traced, not any(unlike(certificate))
    yield from compare(pins, traced, backend, judged_alike, listed_sources())


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
            said = f"expected an entry for {finding.status} of {finding.case}, got none"
            raise InputError(f"{certificate.backend}: {said}; write it into a folder of --expectations")
        findings.append(structs.replace(finding, expectation=seen.expectation))
    changed = structs.replace(certificate, findings=tuple(findings))
    return structs.replace(changed, seal=seal(changed))


def rerun(certificate: Certificate, number: int, backend: str, device: str | None, salt: str) -> Iterator[Remark]:
    judged = judged_cases(certificate)
    cases = random.SystemRandom().sample(judged, min(number, len(judged)))
    try:
        summary = _run(RunRequest.of([backend], device=device, cases=cases, salt=salt))
    except (InputError, CaseError, RunError) as error:
        raise InputError(f"cannot run the cases again: {error}") from error
    yield from compare_machines(certificate.environment, summary.environment)
    yield from compare_loaded(certificate.traced, summary.backends[0].traced)
    found = {record.case: record for record in summary.records}
    for case in cases:
        stated = certificate.cases[case]
        said = f"case {case}: the certificate says {stated}, run again it gives"
        if (now := found.get(case)) is None:
            yield Remark(Weight.AGAINST, f"{said} no verdict")
            continue
        gives = f"{now.status}: {now.message}; {now.replay}" if now.failed else now.status.value
        if differences.contradicts(stated, now.status):
            excused = stated is Status.EXPECTED_FAILURE and salt != certificate.salt  # it may need its own inputs
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
