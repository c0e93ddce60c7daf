"""The journal: one JSON line per event, first the plan, written by the supervisor alone, so that a crash loses nothing.

It is sealed, since a kernel may write into the file: each line names the digest of the one before, and a named pipe
beside the file the digest of the last. The process of a kernel cannot make named pipes.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.backends.roles import outside
from mla_conformance.cases.sharding import Shard
from mla_conformance.driving.loaded import Loaded
from mla_conformance.engine.messages import Found
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.whole import InputError, open_regular, write_whole
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.models.profile import Deployment
from mla_conformance.version import __version__

JOURNAL_NAME = "journal.jsonl"
PLAN_FORMAT = 4


class _Event(msgspec.Struct, frozen=True, tag_field="event"): ...


class Planned(_Event, frozen=True, tag="plan"):
    plan: dict[str, Any]  # what is to be judged, in the form of its time


class Resumed(_Event, frozen=True, tag="resume"): ...


class CaseStarted(_Event, frozen=True, tag="started"):
    case: str
    backend: str


class Judgement(_Event, frozen=True, tag="verdict"):
    """A verdict, which replaces earlier ones on the same question."""

    record: Record


class Learned(_Event, frozen=True, tag="learned"):
    backend: str
    found: Found
    case: str = ""  # that it is about; empty for the backend as a whole


class CodeLoaded(_Event, frozen=True, tag="loaded"):
    loaded: Loaded  # by a process of the backends, what no earlier event tells of


class GaveUp(_Event, frozen=True, tag="gave_up"):
    backend: str
    reason: str


class Completed(_Event, frozen=True, tag="end"): ...


class Reported(_Event, frozen=True, tag="report"):
    sha256: str


JournalEvent = Planned | Resumed | CaseStarted | Judgement | Learned | CodeLoaded | GaveUp | Completed | Reported


class UnwrittenError(OSError):
    """The system did not take a line."""


@dataclass
class Journal:
    path: Path
    _last: str = ""

    def append(self, event: JournalEvent) -> None:
        """Write one event behind those that this object wrote or took up, and hand it to the system."""
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = json.dumps({"after": self._last, **msgspec.to_builtins(event)}).encode("ascii")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line + b"\n") <= len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnwrittenError(error.errno, error.strerror, error.filename) from error
        self._seal(hashlib.sha256(line).hexdigest())

    def _seal(self, last: str) -> None:
        """Have the pipe beside the file name the digest of its last line, which is there already."""
        before, seal = self.seals, self.path.with_name(f".{self.path.name}-{last}")
        if seal not in before:
            with contextlib.suppress(OSError):  # a file system without: nothing is sealed, and no run goes on with it
                os.mkfifo(seal)
        for path in before:
            if path != seal:
                with contextlib.suppress(OSError):  # a kernel may have closed the folder: what was sealed stays so
                    path.unlink()
        self._last = last

    @property
    def seals(self) -> list[Path]:
        found = []
        for path in self.path.parent.glob(f".{self.path.name}-*"):
            with contextlib.suppress(OSError):  # a kernel may make and remove files of such names
                if stat.S_ISFIFO(path.lstat().st_mode):  # a pipe itself, no link to one
                    found.append(path)
        return found

    def events(self) -> Iterator[JournalEvent]:
        """All whole events so far, whoever wrote them; a last line that was cut off is left out."""
        for line in self._lines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield _read(line)

    def is_finished(self) -> bool:
        return [type(event) for event in self.events() if type(event) is not Reported][-1:] == [Completed]

    def sealed(self) -> dict[int, JournalEvent]:
        """The events that runs wrote, each by the number of its line, counted from 1."""
        sealed, found = {path.name.rpartition("-")[2] for path in self.seals}, dict[int, JournalEvent]()
        for number, line in reversed(list(enumerate(self._lines(), start=1))):
            if hashlib.sha256(line).hexdigest() not in sealed:
                continue
            try:
                found[number] = _read(line)
            except ValueError as error:
                what = f"expected an event of a run as JSON, got {line[:80]!r}: {error}"
                raise InputError(f"{self.path}, line {number}: {what}") from None
            sealed = {json.loads(line).get("after")}
        if sealed != {""}:
            raise InputError(
                f"{self.path}: expected a journal as its run left it, with its seal beside it, a named pipe "
                f".{self.path.name}-…; it was changed, cut or moved, or of an older version: start the run anew"
            )
        return dict(sorted(found.items()))

    def take_up(self) -> list[int]:
        """Keep of the file what runs wrote, which is sealed, for the next event behind it; numbers of lines that go."""
        lines, kept = self._lines(), self.sealed()
        write_whole(self.path, "".join(f"{lines[number - 1].decode('ascii')}\n" for number in kept))
        self._seal(hashlib.sha256(lines[max(kept) - 1]).hexdigest())
        return [number for number in range(1, len(lines) + 1) if number not in kept]

    def _lines(self) -> list[bytes]:
        with open_regular(self.path) as file:
            content = file.read()
        return content[: content.rfind(b"\n") + 1].splitlines()


def _read(line: bytes) -> JournalEvent:
    def refuse(constant: str) -> None:
        raise ValueError(f"expected a number, got {constant}")

    try:  # unlike msgspec json reads the half of a pair, as of a message
        event: JournalEvent = msgspec.convert(json.loads(line, parse_constant=refuse), JournalEvent)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return event


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    format: int  # version of this form
    suite: str
    torch: str
    device: str
    device_name: str
    tier: str
    backends: dict[str, str]  # what tells that each backend, by reference, is still the same
    capabilities: dict[str, str]  # number and digest of each capability's cases
    cases: tuple[str, ...]  # ids of cases that were asked for one by one
    explore: str  # how much is drawn for each backend; 0 for nothing
    shard: Shard | None = None
    deployment: Deployment | None = None
    salt: str = ""
    role: str = ""  # the file of one from outside

    @staticmethod
    def of(request: RunRequest, device: str, environment: Mapping[str, str], facts: Iterable[BackendFacts]) -> "Plan":
        lists = {}
        for name in request.capabilities:
            ids = [case.id for case in request.cases_of(name)]
            lists[name] = f"{len(ids)} cases {hashlib.sha256(chr(10).join(ids).encode()).hexdigest()[:12]}"
        return Plan(
            format=PLAN_FORMAT,
            suite=__version__,
            torch=environment["torch"],
            device=device,
            device_name=environment["device"],
            tier=request.tier.value,
            backends={x.reference: f"{x.fingerprint}, region {x.region}" if x.region else x.fingerprint for x in facts},
            capabilities=lists,
            cases=tuple(case.id for case in request.cases),
            explore=str(request.explore) if any(request.explore) else "0",
            shard=request.shard,
            deployment=request.deployment,
            salt=request.salt,
            role=outside(),
        )

    @staticmethod
    def recorded(journal: Journal) -> "Plan":
        first, *_ = journal.sealed().values()
        if not isinstance(first, Planned):
            raise InputError(f"{journal.path}: expected a journal that starts with the plan of a run")
        if first.plan.get("format") != PLAN_FORMAT:
            raise InputError(f"{journal.path}: expected plan format {PLAN_FORMAT}, got {first.plan.get('format')!r}")
        try:
            return msgspec.convert(first.plan, Plan, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"{journal.path}: malformed plan: {error}") from error

    def differences(self, current: "Plan") -> list[str]:
        found = []
        for name in Plan.__struct_fields__:
            old, new = getattr(self, name), getattr(current, name)
            if isinstance(old, dict):
                changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                found += [f"{name}: {key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}" for key in changed]
            elif old != new:
                was, now = (list(value) if isinstance(value, tuple) else value for value in (old, new))
                found.append(f"{name}: was {was}, is {now}")
        return found
