"""Calls of a backend under NVIDIA's compute-sanitizer, and its XML (2025.3.1): errors, grouped by kernel and cause."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_BESIDE = Path("/usr/local/cuda/bin") / PROGRAM
_WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor gets memory of its own; otherwise what lies behind one belongs to a block of the allocator."""
LONGEST = 400  # characters of a name or a message that are kept
_ROOT = "ComputeSanitizerOutput"
_LAUNCHERS = re.compile(r"-packages/(triton|torch|mla_conformance)/")  # frames that decide on no launch
_TORCHS = re.compile(r"\bat::|\bat_cuda_detail::|\bc10::")
"""Torch's own kernels, which make inputs and copies, too: reports on them are no backend's but in memcheck."""
_MEMCHECK = ("Precise", "Imprecise", "Api")
_REFUSALS = re.compile(r"call to cuGetProcAddress|\(error 2\) due to")  # of lookups and memory, which libraries handle
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\(\d+,\s*\d+,\s*\d+\)")
_MOST_BYTES = 2**26


class UnreadableOutput(ValueError):
    """A file that is not what the tool writes; the message says what was expected."""


@dataclass(frozen=True)
class SanitizerError:
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
    telling = [  # without what follows from others: after an error of a kernel every call of the host fails
        each
        for each in root.findall("record")
        if (_first(each, "kind") in _MEMCHECK or not _TORCHS.search(_place(each, "func")))
        and not _REFUSALS.search(_first(each, "what/text"))
    ]
    of_kernels = [each for each in telling if _first(each, "kind") != "Api"] or telling
    found = (error for error, _ in joined([("", tuple(map(_error, of_kernels)))]))
    return tuple(sorted(found, key=lambda each: -each.count))


def _error(record: ElementTree.Element) -> SanitizerError:
    kernel = _place(record, "func") or _first(record, "what/api") or "host"
    race = [_first(record, f"what/{name}/direction").lower() for name in ("source", "destination")]
    in_words = f"({race[0]} in line {_first(record, 'what/source/where/line')}, {race[1]})" if all(race) else ""
    said = _first(record, "what/text", "what/error", "what/result")
    told = " ".join([said, _first(record, "what/type"), in_words])
    path, line = _place(record, "path"), _place(record, "line")
    place = f"{path}:{line}" if path and line else path or _place(record, "module")
    cause = " ".join(_VARYING.sub("…", told).split())[:LONGEST]
    frames = ((_first(frame, "path"), _first(frame, "line")) for frame in record.iterfind("hostStack/frame"))
    python = (f"{path}:{line}" for path, line in frames if path.endswith(".py") and not _LAUNCHERS.search(path))
    return SanitizerError(kernel[:LONGEST], cause, place=place, launch=next(python, ""))


def _place(record: ElementTree.Element, name: str) -> str:  # of a race the second one
    return _first(record, f"where/{name}", f"what/destination/where/{name}")


def _first(record: ElementTree.Element, *paths: str) -> str:
    return next(filter(None, ((record.findtext(path) or "").strip() for path in paths)), "")


def joined(found: Iterable[tuple[str, tuple[SanitizerError, ...]]]) -> Iterator[tuple[SanitizerError, str]]:
    """Errors of several cases, equal ones as one, each with the first case that shows it."""
    known: dict[tuple[str, str], tuple[SanitizerError, str]] = {}
    for case, errors in found:
        for error in errors:
            before, first = known.get((error.kernel, error.cause), (replace(error, count=0), case))
            known[error.kernel, error.cause] = replace(before, count=before.count + error.count), first
    yield from known.values()


class ToolUnavailable(Exception):
    """There is no tool that could watch anything, or it did not come to its end."""


@dataclass(frozen=True)
class Tool:
    """The program as it is installed, and the version of the CUDA toolkit that it lies in, where that tells."""

    path: str
    version: str
    cuda: str = ""

    @staticmethod
    def found() -> "Tool":
        path = shutil.which(PROGRAM) or (str(_BESIDE) if _BESIDE.exists() else "")
        if not path:
            raise ToolUnavailable(f"{PROGRAM} is not installed here; it comes with the CUDA toolkit")
        done, cuda = _run([path, "--version"], 60.0), ""
        version = re.search(r"\bVersion (\d[\w.]*)", done.stdout)
        if done.returncode or not version:
            raise ToolUnavailable(f"{path} does not say which version it is; {_last_words(done)}")
        for folder in Path(path).resolve().parents[2::-1]:  # every toolkit has a file in its first one
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                cuda = str(json.loads((folder / "version.json").read_text(encoding="utf-8"))["cuda"]["version"])
        return Tool(path, version[1], cuda)

    def __str__(self) -> str:
        return f"{PROGRAM} {self.version}" + (f" of CUDA {self.cuda}" if self.cuda else "")


class CallsBegin(msgspec.Struct, frozen=True):
    environment: dict[str, str] = {}  # device and versions that the calls run with
    versions: dict[str, str] = {}  # of the distributions behind the backend
    unavailable: str = ""  # why nothing is called; empty where something is
    chosen: tuple[str, ...] = ()  # ids of the cases that are called, in this order
    unsupported: tuple[str, ...] = ()  # ids of those that are not, since the backend does not support them here


@dataclass(frozen=True)
class Sanitized:
    case: str
    errors: tuple[SanitizerError, ...] = ()
    unavailable: str = ""
    seconds: float = 0.0  # of its calls, compiling included

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.unavailable)


@dataclass(frozen=True)
class Watched:
    """What became of a backend: with what it was called, if its process came so far, or why nothing was called."""

    begin: CallsBegin | None = None
    cases: tuple[Sanitized, ...] = ()
    unavailable: str = ""


@dataclass(frozen=True)
class Watch:
    tool: Tool
    check: str
    reference: str
    device: str
    seconds: float

    def calls(self, cases: Sequence[str], most: int = 0) -> Watched:
        """Call cases, ``most`` of each capability and role, and what is not clean in a process of its own."""
        first, errors = self._attempt(cases, most)
        if first.begin is None:
            reported = (f"{each.kernel}: {each.cause}" for each in errors[:1])
            return Watched(unavailable="; ".join([first.unavailable, *reported]))
        found = list(first.cases)
        for number, each in enumerate(first.cases if len(found) > 1 else ()):
            if errors or not each.is_clean:
                alone, own = self._attempt([each.case], 0)
                found[number] = next(iter(alone.cases), Sanitized(each.case, own, alone.unavailable))
        return Watched(first.begin, tuple(found), first.begin.unavailable)

    def _attempt(self, cases: Sequence[str], most: int) -> tuple[Watched, tuple[SanitizerError, ...]]:
        with tempfile.TemporaryDirectory(prefix="mla-conformance-sanitize-") as folder:
            output, lines = Path(folder, "output.xml"), Path(folder, "called")
            command = [self.tool.path, "--tool", self.check, "--xml", "--save", str(output)]
            command += ["--target-processes", "all", sys.executable, "-m", __name__]
            errors, why = tuple[SanitizerError, ...](), ""
            try:
                done = _run([*command, self.reference, self.device, str(lines), str(most), *cases], self.seconds)
                if not output.exists():
                    raise UnreadableOutput(f"{PROGRAM} wrote no output: it may not attach here")
                if output.stat().st_size > _MOST_BYTES:
                    raise UnreadableOutput(f"{PROGRAM} wrote more than {_MOST_BYTES} bytes")
                errors = errors_of(output.read_text(encoding="utf-8", errors="replace"))
            except ToolUnavailable as error:
                why = str(error)
            except UnreadableOutput as error:
                why = f"{error}; {_last_words(done)}"
            # What the process wrote before it ended, however it did.
            first, *others = (lines.read_bytes() if lines.exists() else b"").split(b"\n")[:-1] or [b""]
            begin = msgspec.json.decode(first, type=CallsBegin) if first else None
            ended = {each.case: each for each in (msgspec.json.decode(line, type=Sanitized) for line in others)}
            if not why and (begin is None or len(ended) != len(begin.chosen) or done.returncode):
                why = f"the calls were not made under it; {_last_words(done)}"
        chosen = begin.chosen if begin else ()
        called = [ended.get(case, Sanitized(case, unavailable="it was not called")) for case in chosen]
        unclear = ["" if errors else why or each.unavailable for each in called]
        found = [replace(each, errors=errors, unavailable=said) for each, said in zip(called, unclear, strict=True)]
        return Watched(begin, tuple(found), why), errors


def _run(command: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
            env=os.environ | _WITHOUT_CACHE,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ToolUnavailable(f"took longer than {seconds:.0f} s") from error
    except OSError as error:
        raise ToolUnavailable(f"{command[0]} cannot be run: {error.strerror}") from error


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    printed: Iterable[str] = (line.strip("= \t\r") for line in f"{done.stdout}\n{done.stderr}".splitlines())
    lines = [line for line in printed if line][-3:]  # where the tool gives up, it says why in more than one
    return f"exit status {done.returncode}" + (f": {' / '.join(lines)[-LONGEST:]}" if lines else "")


def main(told: Sequence[str]) -> None:
    """Call cases, at most so many of each capability and role or with 0 all, and write what became of them."""
    import torch  # not for whoever only reads the lines

    from mla_conformance.backends.foreign import one_line
    from mla_conformance.backends.kernel import describe_device, get_device_capability
    from mla_conformance.cases.case import Case
    from mla_conformance.driving.driver import run_calls
    from mla_conformance.roles.definition import build_problem
    from mla_conformance.trials.facts import describe
    from mla_conformance.trials.subject import Subject

    reference, device, path, most, *ids = told
    with Path(path).open("ab", buffering=0) as file:

        def tell(what: CallsBegin | Sanitized) -> None:
            file.write(msgspec.json.encode(what) + b"\n")

        environment = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda or "")}
        if device == "cuda" and not torch.cuda.is_available():
            tell(CallsBegin(environment, unavailable="torch sees no CUDA device"))
            return
        sys.path.append(str(Path.cwd()))
        subject = Subject.of(reference, torch.device(device))
        capability = get_device_capability(subject.device)
        environment["device"] = describe_device(subject.device)
        environment["compute_capability"] = str(capability) if capability else ""
        if subject.unavailable:
            tell(CallsBegin(environment, unavailable="; ".join(subject.unavailable)))
            return
        chosen, unsupported, taken = list[Case](), list[str](), Counter[tuple[str, str]]()
        for case in map(Case.parse, ids):
            kind = case.capability, case.role
            if int(most) and taken[kind] == int(most):
                continue
            if subject.unsupported(case):
                unsupported.append(case.id)
                continue
            taken[kind] += 1
            chosen.append(case)
        named = tuple(case.id for case in chosen)
        tell(CallsBegin(environment, describe(subject).versions, "", named, tuple(unsupported)))
        for case in chosen:
            began = time.perf_counter()
            try:
                error = run_calls(subject.create(case), build_problem(case, subject.device)).error
                raised = error.error if error else ""
            except Exception as failure:  # a constructor may raise, and a lost context makes no inputs
                raised = one_line(failure)
            why = f"the call raised {raised}" if raised else ""
            tell(Sanitized(case.id, unavailable=why, seconds=round(time.perf_counter() - began, 2)))


if __name__ == "__main__":
    main(sys.argv[1:])
