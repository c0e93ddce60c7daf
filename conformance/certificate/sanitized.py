"""What a tool of compute-sanitizer reported of a kernel, kept with its record; no verdict rests on it."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.certificate.certificate import Certificate, Text
from mla_conformance.traits.sanitizer import TOOLS

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
        schema: of the report.
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


def sanitized_problems(certificate: Certificate, sanitized: Sequence[SanitizedKernel]) -> Iterator[str]:
    """What tools reported of another kernel, suite or version than a record's, or in no form that is known."""
    for found in sanitized:
        if found.schema != SCHEMA or found.tool not in TOOLS:
            known = f"{SCHEMA} of one of {', '.join(TOOLS)}"
            yield f"a sanitizer's report: expected {known}, got {found.schema!r} of {found.tool!r}"
        stated = {"backend": found.backend, "suite": found.suite, **found.versions}
        expected = {"backend": certificate.backend, "suite": certificate.suite, **certificate.pins.versions}
        for name in sorted(stated.keys() & expected.keys()):
            if stated[name] != expected[name]:
                yield f"the report of {found.tool} is of {name} {stated[name]}, the record of {expected[name]}"
