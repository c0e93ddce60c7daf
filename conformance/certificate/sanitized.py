"""What a tool of compute-sanitizer reported of a kernel, as a file beside its record; no verdict rests on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from mla_conformance.certificate.certificate import Certificate, Text
from mla_conformance.certificate.submission import RECORD_NAME, SANITIZED_NAMES, folder_of
from mla_conformance.files.inputs import InputError, decode, read_text
from mla_conformance.files.outputs import write_output
from mla_conformance.report.json_report import to_text

SCHEMA = "mla-conformance-sanitized/1"


class SanitizerFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal errors of one kernel.

    Attributes:
        kernel: its name.
        cause: what the tool says.
        count: how often.
        place: of the source; empty if it is not told.
        launch: the line of Python that launched the first; empty if none did.
        case: the first that shows it.
    """

    kernel: Text
    cause: str
    count: Annotated[int, Meta(ge=1)]
    place: str = ""
    launch: str = ""
    case: Text


class SanitizedKernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel under one tool.

    Attributes:
        schema: of the file.
        suite: version of the suite.
        version: of this project.
        date: ISO date.
        backend: its name.
        reference: what loads it.
        device: where.
        environment: device, driver, CUDA, torch and Python.
        versions: of the distributions behind the backend.
        tool: of compute-sanitizer.
        tool_version: its version.
        tool_cuda: the CUDA toolkit that it is of; empty where that does not tell.
        checked: seconds of the calls of each case that the tool watched.
        unchecked: why it watched nothing, of each other case.
        errors: what it reports.
    """

    schema: str = SCHEMA
    suite: Text
    version: Text
    date: Text
    backend: Text
    reference: Text
    device: Text
    environment: dict[str, str]
    versions: dict[str, str]
    tool: Text
    tool_version: Text
    tool_cuda: str = ""
    checked: Annotated[dict[str, Annotated[float, Meta(ge=0)]], Meta(min_length=1)]
    unchecked: dict[str, str] = {}
    errors: tuple[SanitizerFinding, ...] = ()


def write_sanitized(root: Path, found: SanitizedKernel) -> Path:
    """Write it where the kernel's record is, or will be, below ``root``.

    Raises:
        InputError: it cannot be written.
    """
    path = root / folder_of(found.suite, found.backend) / SANITIZED_NAMES[found.tool]
    write_output(path, to_text(msgspec.to_builtins(found)))
    return path


def read_sanitized(record: Path) -> list[SanitizedKernel]:
    """What lies beside the record of a submission, tool by tool.

    Raises:
        InputError: a file cannot be read, or is none of this form.
    """
    if record.name != RECORD_NAME:
        return []
    return [_read(path) for path in map(record.with_name, SANITIZED_NAMES.values()) if path.exists()]


def _read(path: Path) -> SanitizedKernel:
    found = decode(read_text(path), SanitizedKernel, str(path))
    if found.schema != SCHEMA:
        raise InputError(f"{path}: expected schema {SCHEMA}, got {found.schema!r}")
    if path.name != SANITIZED_NAMES.get(found.tool):
        raise InputError(f"{path}: expected what {path.stem.partition('-')[2]} reported, got tool {found.tool!r}")
    return found


def sanitized_problems(record: Path, certificate: Certificate) -> Iterator[str]:
    """What lies beside a record and is of another kernel, suite or version."""
    try:
        found = read_sanitized(record)
    except InputError as error:
        yield str(error)
        return
    for each in found:
        stated = {"backend": each.backend, "suite": each.suite, **each.versions}
        expected = {"backend": certificate.backend, "suite": certificate.suite, **certificate.pins.versions}
        for name in sorted(stated.keys() & expected.keys()):
            if stated[name] != expected[name]:
                yield f"{SANITIZED_NAMES[each.tool]} is of {name} {stated[name]}, the record of {expected[name]}"
