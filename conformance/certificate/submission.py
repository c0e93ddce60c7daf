"""Submissions: a record handed in, as ``<suite>/<kernel>/`` with what was installed where it was made.

One of other versions of the kernel's packages stays, as ``<suite>/<kernel>@<versions>/``.
"""

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from mla_conformance.certificate.certificate import Certificate, Outdated, read_certificate
from mla_conformance.certificate.signature import signature_of
from mla_conformance.files.inputs import InputError, read_text
from mla_conformance.files.outputs import write_output
from mla_conformance.report.json_report import to_text
from mla_conformance.traits.sanitizer import TOOLS

RECORD_NAME, ENVIRONMENT_NAME = "record.json", "environment.txt"
SANITIZED_NAMES = {tool: f"sanitize-{tool}.json" for tool in TOOLS}
"""By tool of compute-sanitizer, the file of what it reported."""


def folder_of(suite: str, backend: str) -> Path:
    """The folder of a kernel below that of all submissions."""
    return Path(suite) / re.sub(r"[^\w.-]+", "-", backend, flags=re.ASCII).strip("-")


def _kept_folder_of(certificate: Certificate) -> Path:
    """The folder of a record that one of other versions has replaced."""
    versions = re.sub(r"[^\w.]+", "-", "-".join(certificate.pins.versions.values()), flags=re.ASCII)
    folder = folder_of(certificate.suite, certificate.backend)
    return folder.with_name(f"{folder.name}@{versions}")


def suite_order(suite: str) -> list[int]:
    """Later suites compare greater."""
    return [int(number) for number in re.findall(r"\d{1,9}", suite)]


def write_submission(root: Path, certificate: Certificate) -> Path:
    """Write what is handed in below ``root``, without an earlier signature; the path of the record.

    Raises:
        InputError: it cannot be written, or what stands there is no record.
    """
    record = root / folder_of(certificate.suite, certificate.backend) / RECORD_NAME
    if record.exists():
        _keep_other_versions(root, record, certificate)
    write_output(record, to_text(certificate.to_json()))
    write_output(record.with_name(ENVIRONMENT_NAME), _environment())
    signature_of(record).unlink(missing_ok=True)
    return record


def _keep_other_versions(root: Path, record: Path, after: Certificate) -> None:
    """Move the record of other versions of the kernel's packages aside, over an earlier one of just these."""
    try:
        before = read_certificate(record)
    except Outdated as old:
        raise InputError(f"{record}: {old}") from old
    kept = root / _kept_folder_of(before)
    if before.pins.versions == after.pins.versions:
        return
    try:
        if kept.exists():
            shutil.rmtree(kept)
        record.parent.rename(kept)
    except OSError as error:
        raise InputError(f"{kept}: cannot be written: {error.strerror}") from error


def _environment() -> str:
    """What is installed here, a line for each distribution, as ``pip freeze`` has it."""
    found: dict[str, str] = {}
    for each in distributions():  # of two with one name the first is imported
        found.setdefault(canonicalize_name(each.metadata["Name"] or ""), f"{each.metadata['Name']}=={each.version}\n")
    return "".join(found[name] for name in sorted(found) if name)


def records_below(folder: Path) -> list[Path]:
    """The records of all submissions in a folder, which may be one of them.

    Raises:
        InputError: there is none.
    """
    found = sorted(folder.rglob(RECORD_NAME))
    if not found:
        raise InputError(f"{folder}: expected submissions, <suite>/<kernel>/{RECORD_NAME}; there is none in it")
    return found


def strays(folder: Path, records: list[Path]) -> Iterator[str]:
    """What lies in a folder of submissions beside them."""
    own = {record.parent for record in records}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or (path.is_file() and path.parent not in own):
            yield f"{path.relative_to(folder)} belongs to no submission"


def folder_problems(record: Path, certificate: Certificate) -> Iterator[str]:
    """What is wrong with the folder of a record, whatever the record says."""
    kernel, suite = record.resolve().parent, record.resolve().parent.parent
    expected = folder_of(certificate.suite, certificate.backend)
    if (suite.name, kernel.name) not in (expected.parts, _kept_folder_of(certificate).parts):
        yield f"it lies in {suite.name}/{kernel.name}, expected {expected}, of what it is"
    known = {RECORD_NAME, ENVIRONMENT_NAME, signature_of(record).name}
    for name in sorted({path.name for path in kernel.iterdir()} - known - set(SANITIZED_NAMES.values())):
        yield f"{name} lies beside it; expected {', '.join(sorted(known))} and nothing else"
    yield from _installed(record.with_name(ENVIRONMENT_NAME), certificate)


def _installed(path: Path, certificate: Certificate) -> Iterator[str]:
    if not path.is_file():
        yield f"there is no {path.name} beside it, which says what was installed"
        return
    reported = dict(line.partition("==")[::2] for line in read_text(path).splitlines())
    versions = {canonicalize_name(name): version for name, version in reported.items()}
    for name in certificate.pins.installed:
        version, stated = certificate.pins.versions.get(name, ""), versions.get(canonicalize_name(name))
        if stated != version:
            yield f"{path.name} says {name} {'is not installed' if stated is None else stated}, the record {version}"
