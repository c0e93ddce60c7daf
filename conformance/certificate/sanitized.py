"""What a tool of compute-sanitizer reported of a kernel, kept with its record; no verdict rests on it."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.certificate.certificate import Certificate, Text
from mla_conformance.traits.sanitizer import TOOLS

SCHEMA = "mla-conformance-sanitized/1"


class SanitizerFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal errors of one kernel."""

    kernel: Text  # its name
    cause: str  # what the tool says
    count: Annotated[int, Meta(ge=1)]  # how often
    place: str = ""  # of the source; empty if it is not told
    launch: str = ""  # the line of Python that launched the first; empty if none did
    case: Text  # the first that shows it


class SanitizedKernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel under one tool."""

    schema: str = SCHEMA  # of the report
    suite: Text  # version of the suite
    version: Text  # of this project
    date: Text  # ISO date
    backend: Text  # its name
    reference: Text  # what loads it
    device: Text  # where
    environment: dict[str, str]  # device, driver, CUDA, torch and Python
    versions: dict[str, str]  # of the distributions behind the backend
    tool: Text  # of compute-sanitizer
    tool_version: Text  # its version
    tool_cuda: str = ""  # the CUDA toolkit that it is of; empty where that does not tell
    # seconds of the calls of each case that the tool watched
    checked: Annotated[dict[str, Annotated[float, Meta(ge=0)]], Meta(min_length=1)]
    unchecked: dict[str, str] = {}  # why it watched nothing, of each other case
    errors: tuple[SanitizerFinding, ...] = ()  # what it reports


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
