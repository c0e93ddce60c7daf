"""Calls under NVIDIA's compute-sanitizer: its XML, grouped by kernel and cause. No torch.

Source of the form: what Compute Sanitizer 2025.3.1 wrote on an H200, of each tool one kernel with a planted error.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from mla_conformance.traits import called

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_PROGRAM, _BESIDE = "compute-sanitizer", Path("/usr/local/cuda/bin/compute-sanitizer")
_ROOT = "ComputeSanitizerOutput"
_HOST = "host"
_LAUNCHERS = re.compile(r"-packages/(triton|torch|mla_conformance)/")
"""Packages whose frames are not where somebody decided to launch a kernel."""
_TORCHS = re.compile(r"\bat::|\bat_cuda_detail::|\bc10::")
"""Torch's own kernels, which make inputs and copies, too: reports on them are no backend's but in memcheck."""
_MEMCHECK = ("Precise", "Imprecise", "Api")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\(\d+,\s*\d+,\s*\d+\)")
_LONGEST = 400
_MOST_BYTES = 2**26
_WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor gets memory of its own; otherwise what lies behind one belongs to a block of the allocator."""


class UnreadableOutput(ValueError):
    """A file that is not what the tool writes; the message says what was expected."""


@dataclass(frozen=True)
class SanitizerError:
    """Equal errors of one kernel.

    Attributes:
        kernel: its name, or the function of the host's interface.
        cause: what the tool says, without addresses and threads.
        count: how many records.
        place: source line, or else module, of the first; empty if it is not told.
        launch: the line of Python that launched the first; empty if none did.
    """

    kernel: str
    cause: str
    count: int = 1
    place: str = ""
    launch: str = ""


def errors_of(text: str) -> tuple[SanitizerError, ...]:
    """The errors in the tool's XML, the most frequent first; those of the host only where no kernel has any.

    Raises:
        UnreadableOutput: something else, or a document that was cut off.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UnreadableOutput(f"expected XML of {_PROGRAM}: {error}") from error
    if root.tag != _ROOT:
        raise UnreadableOutput(f"expected XML of {_PROGRAM}, whose root is {_ROOT}, got {root.tag}")
    found: dict[tuple[str, str], SanitizerError] = {}
    for record in _telling(root.findall("record")):
        told = _error(record)
        known = found.get((told.kernel, told.cause))
        found[told.kernel, told.cause] = replace(known, count=known.count + 1) if known else told
    return tuple(sorted(found.values(), key=lambda each: -each.count))


def _telling(records: list[ElementTree.Element]) -> list[ElementTree.Element]:
    """Without what follows from others: after an error of a kernel every call of the host fails."""
    telling = [each for each in records if _kind(each) in _MEMCHECK or not _TORCHS.search(_place(each, "func"))]
    return [each for each in telling if _kind(each) != "Api"] or telling


def _kind(record: ElementTree.Element) -> str:
    return _first(record, "kind")


def _error(record: ElementTree.Element) -> SanitizerError:
    kernel = _place(record, "func") or _first(record, "what/api") or _HOST
    said = [_first(record, name) for name in ("what/text", "what/error", "what/result")]
    told = " ".join([next(filter(None, said), ""), _first(record, "what/type"), *_accesses(record)])
    path, line = _place(record, "path"), _place(record, "line")
    place = f"{path}:{line}" if path and line else path or _place(record, "module")
    cause = " ".join(_VARYING.sub("…", told).split())[:_LONGEST]
    return SanitizerError(kernel[:_LONGEST], cause, place=place, launch=_launch(record))


def _place(record: ElementTree.Element, name: str) -> str:
    """Of a race, where the second access was made."""
    return _first(record, f"where/{name}") or _first(record, f"what/destination/where/{name}")


def _accesses(record: ElementTree.Element) -> list[str]:
    """The two of a race, in words."""
    both = [_first(record, f"what/{name}/direction").lower() for name in ("source", "destination")]
    line = _first(record, "what/source/where/line")
    return [f"({both[0]} in line {line}, {both[1]})"] if all(both) else []


def _launch(record: ElementTree.Element) -> str:
    """The innermost line of Python in the host's stack that is of no launcher."""
    for frame in record.iterfind("hostStack/frame"):
        path, line = _first(frame, "path"), _first(frame, "line")
        if path.endswith(".py") and not _LAUNCHERS.search(path):
            return f"{path}:{line}"
    return ""


def _first(record: ElementTree.Element, path: str) -> str:
    return (record.findtext(path) or "").strip()


@dataclass(frozen=True)
class Sanitized:
    """What became of one case under the tool.

    Attributes:
        case: its id.
        errors: what the tool reports.
        unavailable: why that says nothing; empty if it does.
        unsupported: whether the backend does not support the case.
    """

    case: str
    errors: tuple[SanitizerError, ...] = ()
    unavailable: str = ""
    unsupported: bool = False


def program() -> str:
    """Where the tool is; empty if it is not here."""
    return shutil.which(_PROGRAM) or (str(_BESIDE) if _BESIDE.exists() else "")


def sanitized(path: str, tool: str, reference: str, case: str, device: str, seconds: float) -> Sanitized:
    """Call a backend on a case under the tool.

    Args:
        path: of the program.
        tool: one of :data:`TOOLS`.
        reference: the backend.
        case: its id.
        device: where.
        seconds: how long it may take.
    """
    with tempfile.TemporaryDirectory(prefix="mla-conformance-sanitize-") as folder:
        output, marker = Path(folder, "output.xml"), Path(folder, "called")
        command = [path, "--tool", tool, "--xml", "--save", str(output), "--target-processes", "all"]
        command += [sys.executable, "-m", called.__name__, reference, case, device, str(marker)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
                env=os.environ | _WITHOUT_CACHE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Sanitized(case, unavailable=f"took longer than {seconds:.0f} s")
        except OSError as error:
            return Sanitized(case, unavailable=f"{path} cannot be run: {error.strerror}")
        return _result(case, done, output, marker)


def _result(case: str, done: "subprocess.CompletedProcess[str]", output: Path, marker: Path) -> Sanitized:
    """Errors count whatever became of the process; that there are none counts only of one that made its calls."""
    if done.returncode == called.NO_DEVICE:
        return Sanitized(case, unavailable="torch sees no CUDA device")
    if done.returncode == called.UNSUPPORTED:
        return Sanitized(case, unsupported=True)
    try:
        errors = errors_of(_read(output))
    except UnreadableOutput as error:
        return Sanitized(case, unavailable=f"{error}; {_last_words(done)}")
    if errors:
        return Sanitized(case, errors)
    if not marker.exists() or done.returncode:
        return Sanitized(case, unavailable=f"the calls were not made under it; {_last_words(done)}")
    raised = marker.read_text(encoding="utf-8")
    return Sanitized(case, unavailable=f"the call raised {raised}" if raised else "")


def _read(output: Path) -> str:
    if not output.exists():
        raise UnreadableOutput(f"{_PROGRAM} wrote no output: it may not attach here")
    if output.stat().st_size > _MOST_BYTES:
        raise UnreadableOutput(f"{_PROGRAM} wrote more than {_MOST_BYTES} bytes")
    return output.read_text(encoding="utf-8", errors="replace")


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return f"exit status {done.returncode}" + (f": {lines[-1][:_LONGEST]}" if lines else "")


def by_error(found: list[Sanitized]) -> Iterator[tuple[SanitizerError, str]]:
    """Errors of all cases, equal ones as one, each with the first case that shows it."""
    joined: dict[tuple[str, str], tuple[SanitizerError, str]] = {}
    for each in found:
        for error in each.errors:
            known, case = joined.get((error.kernel, error.cause), (replace(error, count=0), each.case))
            joined[error.kernel, error.cause] = replace(known, count=known.count + error.count), case
    yield from joined.values()
