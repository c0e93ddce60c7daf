"""Issuing a certificate, only for a complete, unfiltered run of the full tier by one real kernel; and signing it.

Signatures are made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone.
"""

import datetime
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from mla_conformance.certificate.certificate import Certificate, Finding, Unjudged, Worst
from mla_conformance.certificate.pins import Pins, Remark, Weight
from mla_conformance.certificate.verify import listed_ids, record_digests, seal
from mla_conformance.files.whole import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import BackendFacts, Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import DeviationForm
from mla_conformance.report.outcome import refusing
from mla_conformance.report.summary import RunSummary
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.capabilities import Tier


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
    if backend.only_refuses:
        raise Refused(f"{backend.name} is {refusing(backend)}")
    passed = [record for record in backend.records if record.status is Status.PASS]
    worst: dict[str, Worst] = {}
    for rule in sorted({rule for record in passed for rule in record.used}):  # of the error budget
        most = max(passed, key=lambda record: record.shares.get(rule, 0.0))
        worst[rule] = Worst(round(most.shares[rule], 4), most.case)
    waived = (record for record in backend.records if record.status is Status.EXPECTED_FAILURE)
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
        findings=tuple(Finding(r.case, r.judged, r.check, r.message, r.expectation, r.explanation) for r in waived),
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


_PURPOSE = "mla-conformance"  # a signature that the same key made for something else does not count


def signature_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def require_key(key: Path) -> None:
    _require_program()
    if not key.is_file():
        raise InputError(f"--sign {key}: expected the file of an SSH key")


def sign(content: str, key: Path) -> str:
    refused, said = _keygen("sign", content, "-f", str(key), "-n", _PURPOSE)
    if refused:
        raise InputError(f"--sign {key}: ssh-keygen refuses it: {said}")
    return said


def checked(content: str, signature: str | None, name: str, signers: Path) -> Remark:
    """Who signed a file or a record's seal, of those whom a file names; nobody of them speaks against it."""
    if not signers.is_file():
        raise InputError(f"--signers {signers}: expected a file of allowed signers, as ssh-keygen(1) describes it")
    if signature is None:
        return Remark(Weight.AGAINST, f"it is not signed: there is no {name} beside it")
    with tempfile.NamedTemporaryFile("w", suffix=".sig", encoding="utf-8") as file:
        file.write(signature)
        file.flush()
        known = ("-f", str(signers), "-s", file.name)
        refused, said = _keygen("find-principals", content, *known)
        if refused:
            return Remark(Weight.AGAINST, f"{name} is of none of the signers of {signers}: {said}")
        signed_by = said.splitlines()[0]
        refused, said = _keygen("verify", content, *known, "-I", signed_by, "-n", _PURPOSE)
    if refused:
        return Remark(Weight.AGAINST, f"{name} is no signature of {signed_by} under this content: {said}")
    return Remark(Weight.REPORTED, f"signed by {signed_by}")


def _require_program() -> None:
    if shutil.which("ssh-keygen") is None:
        raise InputError("signatures are made and checked by ssh-keygen, which is not here: install OpenSSH's client")


def _keygen(action: str, content: str, *options: str) -> tuple[bool, str]:
    """Whether the program refuses, and why in one line, or else what it printed."""
    _require_program()
    command = ["ssh-keygen", "-Y", action, *options]
    done = subprocess.run(command, input=content, capture_output=True, encoding="utf-8", check=False)
    why = " ".join((done.stderr or done.stdout).split())
    return bool(done.returncode), why if done.returncode else done.stdout
