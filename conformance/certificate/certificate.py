"""What a certificate holds, what a sanitizer reported of its kernel, and signatures.

These are made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone.
"""

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.certificate.pins import Pins, Remark, Weight
from mla_conformance.files.whole import InputError, decode, read_text
from mla_conformance.judging import record
from mla_conformance.judging.traits import Traits
from mla_conformance.report import json_report, summary
from mla_conformance.speed.times import Speed
from mla_conformance.version import SUITE_VERSION

RECORDS = f"fixtures/records/{SUITE_VERSION}.jsonl"  # the file of this suite's records, in a checkout
_NAME, _VERSION = "mla-conformance-certificate", 6
SCHEMA = f"{_NAME}/{_VERSION}"

Text = Annotated[str, Meta(min_length=1)]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure that an expectation waives; early records do not say what it looks like."""

    case: str
    status: record.Status | None
    check: str
    message: str
    expectation: str
    explanation: str | UnsetType = UNSET


class Unjudged(Struct, frozen=True, forbid_unknown_fields=True):
    case: str
    reason: str


class Worst(Struct, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(ge=0, le=1)]
    case: str


class Certificate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a complete run of one real kernel found: its record, and a certificate if it lacks no must-pass case."""

    schema: str = SCHEMA
    suite: Text
    version: Text
    tier: Text
    date: Text
    backend: Text
    reference: Text
    device: Text
    environment: dict[str, str]
    pins: Pins
    rounding: dict[str, str]
    deviations: tuple[json_report.DeviationForm, ...]
    evidence: tuple[dict[str, str], ...]
    traced: record.Traced
    digests: dict[str, str]
    counts: summary.Counts
    worst: dict[str, Worst]
    seconds: Annotated[float, Meta(ge=0)]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, record.Status]
    traits: Traits | UnsetType = UNSET
    speed: Speed | UnsetType = UNSET
    seal: str = ""

    @property
    def is_current(self) -> bool:
        return self.suite == SUITE_VERSION

    @property
    def renewal(self) -> str:
        return renewal(self.reference, self.device)

    @property
    def salt(self) -> str:
        return self.environment.get("salt", "")

    @property
    def distributions(self) -> dict[str, str]:
        """The versions that its adapters declare, or else all that are pinned."""
        pinned = self.pins.versions
        return {name: pinned[name] for name in _declared(self.reference) if name in pinned} or pinned


@cache
def _declared(reference: str) -> tuple[str, ...]:
    """Of a registered backend; nothing of any other, whose code a record must not run."""
    from mla_conformance.backends.declaration import declaration_of  # torch, which a list of commands does without
    from mla_conformance.backends.loading import load_role, roles_of

    try:
        backend = parse_reference(reference)
        roles = roles_of(backend) if backend.members() else ()
        declared = [declaration_of(load_role(backend, role)).distributions for role in roles]
    except (BackendReferenceError, ImportError):
        return ()
    return tuple(dict.fromkeys(name for names in declared for name in names))


def renewal(reference: str, device: str) -> str:
    where = f"--device {'cpu' if device == 'cpu' else 'cuda'}"
    return f"mla-conformance certify --backend {shlex.quote(reference)} {where} --submission {RECORDS}"


class Outdated(InputError):
    """A certificate that an earlier suite wrote in a form of its own."""


class _Head(Struct):
    schema: str = ""
    suite: str = ""
    reference: str = ""
    device: str = ""


def read_certificate(path: Path) -> Certificate:
    head = decode(text := read_text(path), _Head, str(path))
    name, _, version = head.schema.partition("/")
    if name == _NAME and version in map(str, range(1, _VERSION)):
        old = f"of suite {head.suite}, whose form {head.schema} pins too little to be verified"
        raise Outdated(f"{path}: {old}; renew it: {renewal(head.reference, head.device)}")
    if head.schema != SCHEMA:
        raise InputError(f"{path}: expected a certificate of schema {SCHEMA}, got {head.schema!r}")
    return decode(text, Certificate, str(path))


def records_of(backend: str, reference: str, cases: Mapping[str, record.Status]) -> list[record.Record]:
    return [record.Record(backend, reference, case.partition(":")[0], case, status) for case, status in cases.items()]


SANITIZED = "mla-conformance-sanitized/1"


class SanitizerFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kernel: Text  # its name
    cause: str  # what the tool says
    count: Annotated[int, Meta(ge=1)]  # how often
    place: str = ""  # of the source; empty if it is not told
    launch: str = ""  # the line of Python that launched the first; empty if none did
    case: Text  # the first that shows it


class SanitizedKernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str = SANITIZED
    suite: Text
    version: Text  # of this project
    date: Text
    backend: Text
    reference: Text
    device: Text
    environment: dict[str, str]  # device, driver, CUDA, torch and Python
    versions: dict[str, str]  # of the distributions behind the backend
    tool: Text  # of compute-sanitizer
    tool_version: Text
    tool_cuda: str = ""  # the CUDA toolkit that it is of; empty where that does not tell
    # seconds of the calls of each case that the tool watched
    checked: Annotated[dict[str, Annotated[float, Meta(ge=0)]], Meta(min_length=1)]
    unchecked: dict[str, str] = {}  # why it watched nothing, of each other case
    errors: tuple[SanitizerFinding, ...] = ()  # what it reports


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
    return bool(done.returncode), " ".join((done.stderr or done.stdout).split()) if done.returncode else done.stdout
