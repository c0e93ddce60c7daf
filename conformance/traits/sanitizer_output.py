"""The XML of NVIDIA's compute-sanitizer: its errors, grouped by kernel and cause. No torch.

Source of the form: what Compute Sanitizer 2025.3.1 wrote on an H200, of each tool one kernel with a planted error.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

PROGRAM = "compute-sanitizer"
LONGEST = 400  # characters of a name or a message that are kept
_ROOT = "ComputeSanitizerOutput"
_HOST = "host"
_LAUNCHERS = re.compile(r"-packages/(triton|torch|mla_conformance)/")
"""Packages whose frames are not where somebody decided to launch a kernel."""
_TORCHS = re.compile(r"\bat::|\bat_cuda_detail::|\bc10::")
"""Torch's own kernels, which make inputs and copies, too: reports on them are no backend's but in memcheck."""
_MEMCHECK = ("Precise", "Imprecise", "Api")
_REFUSALS = re.compile(r"call to cuGetProcAddress|\(error 2\) due to")
"""The driver refused a function lookup or memory; the library that asked handles it."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\(\d+,\s*\d+,\s*\d+\)")
_MOST_BYTES = 2**26


class UnreadableOutput(ValueError):
    """A file that is not what the tool writes; the message says what was expected."""


@dataclass(frozen=True)
class SanitizerError:
    """Equal errors of one kernel."""

    kernel: str  # its name, or the function of the host's interface
    cause: str  # what the tool says, without addresses and threads
    count: int = 1  # how many records
    place: str = ""  # source line, or else module, of the first; empty if it is not told
    launch: str = ""  # the line of Python that launched the first; empty if none did


def errors_of(text: str) -> tuple[SanitizerError, ...]:
    """The errors in the tool's XML, the most frequent first; those of the host only where no kernel has any."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UnreadableOutput(f"expected XML of {PROGRAM}: {error}") from error
    if root.tag != _ROOT:
        raise UnreadableOutput(f"expected XML of {PROGRAM}, whose root is {_ROOT}, got {root.tag}")
    found: dict[tuple[str, str], SanitizerError] = {}
    # Without what follows from others: after an error of a kernel every call of the host fails.
    telling = [
        each
        for each in root.findall("record")
        if (_first(each, "kind") in _MEMCHECK or not _TORCHS.search(_place(each, "func")))
        and not _REFUSALS.search(_first(each, "what/text"))
    ]
    for record in [each for each in telling if _first(each, "kind") != "Api"] or telling:
        told = _error(record)
        known = found.get((told.kernel, told.cause))
        found[told.kernel, told.cause] = replace(known, count=known.count + 1) if known else told
    return tuple(sorted(found.values(), key=lambda each: -each.count))


def _error(record: ElementTree.Element) -> SanitizerError:
    kernel = _place(record, "func") or _first(record, "what/api") or _HOST
    said = [_first(record, name) for name in ("what/text", "what/error", "what/result")]
    race = [_first(record, f"what/{name}/direction").lower() for name in ("source", "destination")]
    in_words = f"({race[0]} in line {_first(record, 'what/source/where/line')}, {race[1]})" if all(race) else ""
    told = " ".join([next(filter(None, said), ""), _first(record, "what/type"), in_words])
    path, line = _place(record, "path"), _place(record, "line")
    place = f"{path}:{line}" if path and line else path or _place(record, "module")
    cause = " ".join(_VARYING.sub("…", told).split())[:LONGEST]
    frames = ((_first(frame, "path"), _first(frame, "line")) for frame in record.iterfind("hostStack/frame"))
    python = (f"{path}:{line}" for path, line in frames if path.endswith(".py") and not _LAUNCHERS.search(path))
    return SanitizerError(kernel[:LONGEST], cause, place=place, launch=next(python, ""))


def _place(record: ElementTree.Element, name: str) -> str:
    """Of a race, where the second access was made."""
    return _first(record, f"where/{name}") or _first(record, f"what/destination/where/{name}")


def _first(record: ElementTree.Element, path: str) -> str:
    return (record.findtext(path) or "").strip()


def read_output(path: Path) -> str:
    if not path.exists():
        raise UnreadableOutput(f"{PROGRAM} wrote no output: it may not attach here")
    if path.stat().st_size > _MOST_BYTES:
        raise UnreadableOutput(f"{PROGRAM} wrote more than {_MOST_BYTES} bytes")
    return path.read_text(encoding="utf-8", errors="replace")


def joined(found: Iterable[tuple[str, tuple[SanitizerError, ...]]]) -> Iterator[tuple[SanitizerError, str]]:
    """Errors of several cases, equal ones as one, each with the first case that shows it."""
    known: dict[tuple[str, str], tuple[SanitizerError, str]] = {}
    for case, errors in found:
        for error in errors:
            before, first = known.get((error.kernel, error.cause), (replace(error, count=0), case))
            known[error.kernel, error.cause] = replace(before, count=before.count + error.count), first
    yield from known.values()
