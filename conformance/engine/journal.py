"""The journal: one JSON line per event, written by the supervisor alone, so that a crash loses nothing.

Its first event is the plan of the run: what a resumed run must agree with to be the same run.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.cases.sharding import Shard
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.driving.loaded import Loaded
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.inputs import open_regular
from mla_conformance.judging.record import BackendFacts, Record, RecordKey, Traced
from mla_conformance.judging.traits import Traits
from mla_conformance.models.profile import Deployment
from mla_conformance.version import __version__

JOURNAL_NAME = "journal.jsonl"
PLAN_FORMAT = 2


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    pass


class Planned(_Event, frozen=True, tag="plan"):
    """A run begins; what it is to judge, in the form of its time."""

    plan: dict[str, Any]


class Resumed(_Event, frozen=True, tag="resume"):
    """An interrupted run goes on."""


class CaseStarted(_Event, frozen=True, tag="started"):
    """A backend's time on a case begins."""

    case: str
    backend: str


class Judgement(_Event, frozen=True, tag="verdict"):
    """A verdict, which replaces earlier ones on the same question."""

    record: Record


class WasTraced(_Event, frozen=True, tag="traced"):
    """What a backend, by reference, was seen to run."""

    backend: str
    traced: Traced


class Examined(_Event, frozen=True, tag="examined"):
    """What was found of a backend, by reference, beside verdicts."""

    backend: str
    traits: Traits


class HeatShown(_Event, frozen=True, tag="heat"):
    """Where the errors of a failure are."""

    backend: str
    case: str
    heat: HeatMap


class CodeLoaded(_Event, frozen=True, tag="loaded"):
    """Code that a process of the backends had loaded, and that no earlier event tells of."""

    loaded: Loaded


class GaveUp(_Event, frozen=True, tag="gave_up"):
    """The rest of a backend's cases is not run."""

    backend: str
    reason: str


class Completed(_Event, frozen=True, tag="end"):
    """The run came to its end."""


class Reported(_Event, frozen=True, tag="report"):
    """The report was written; its SHA-256."""

    sha256: str


JournalEvent = (
    Planned
    | Resumed
    | CaseStarted
    | Judgement
    | WasTraced
    | Examined
    | HeatShown
    | CodeLoaded
    | GaveUp
    | Completed
    | Reported
)


class JournalError(ValueError):
    """A journal that no run wrote as it stands."""


class UnwrittenError(OSError):
    """The system did not take a line."""


@dataclass(frozen=True)
class Journal:
    """The event file of a run: its plan, each start and each verdict, what was given up, and its end."""

    path: Path

    @staticmethod
    def inside(directory: Path) -> "Journal":
        """The journal of an output folder."""
        return Journal(directory / JOURNAL_NAME)

    def append(self, event: JournalEvent) -> None:
        """Write one event and hand it to the system.

        Raises:
            UnwrittenError: the system did not take the whole line.
        """
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = (json.dumps(msgspec.to_builtins(event)) + "\n").encode("ascii")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnwrittenError(error.errno, error.strerror, error.filename) from error

    def events(self) -> Iterator[JournalEvent]:
        """All whole events so far; a last line that was cut off is left out."""
        for line in self._whole().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield _read(line)

    def records(self) -> dict[RecordKey, Record]:
        """The last verdict on each question."""
        return {event.record.record_key: event.record for event in self.events() if isinstance(event, Judgement)}

    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return [type(event) for event in self.events() if type(event) is not Reported][-1:] == [Completed]

    def check(self) -> None:
        """Read every line but one at the end that was cut off.

        Raises:
            JournalError: a line is no event.
        """
        for number, line in enumerate(self._whole().splitlines(), start=1):
            try:
                _read(line)
            except ValueError as error:
                where = f"{self.path}, line {number}"
                what = f"expected an event of a run as JSON, got {line[:80]!r}: {error}"
                raise JournalError(f"{where}: {what}") from None

    def repair(self) -> None:
        """Remove a last line that was cut off, so that the next event starts a line of its own."""
        os.truncate(self.path, len(self._whole()))

    def _whole(self) -> bytes:
        with open_regular(self.path) as file:
            content = file.read()
        return content[: content.rfind(b"\n") + 1]


def _read(line: bytes) -> JournalEvent:
    """The event of a line.

    Raises:
        ValueError: it holds none.
    """
    try:
        plain = json.loads(line, parse_constant=_refuse)  # unlike msgspec it reads the half of a pair, as of a message
        event: JournalEvent = msgspec.convert(plain, JournalEvent)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"expected a number, got {constant}")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is to judge, and with what.

    Attributes:
        format: version of this form.
        suite: version of the suite.
        torch: version of torch.
        device: ``cpu`` or ``cuda``.
        device_name: name of the device.
        tier: tier of the cases.
        backends: what tells that each backend, by reference, is still the same.
        capabilities: number and digest of each capability's cases.
        cases: ids of cases that were asked for one by one.
        explore: how much is drawn for each backend; 0 for nothing.
        shard: the part of the list that is judged.
        deployment: the model that the cases are of, if they are.
        salt: what inputs are drawn with beside their case.
        apart: whether inputs, kernel and judge are in processes of their own.
    """

    format: int
    suite: str
    torch: str
    device: str
    device_name: str
    tier: str
    backends: dict[str, str]
    capabilities: dict[str, str]
    cases: tuple[str, ...]
    explore: str
    shard: Shard | None = None
    deployment: Deployment | None = None
    salt: str = ""
    apart: bool = False

    @staticmethod
    def of(request: RunRequest, device: str, environment: Mapping[str, str], facts: Iterable[BackendFacts]) -> "Plan":
        """The plan of a request on a device, for backends as they are now."""
        return Plan(
            format=PLAN_FORMAT,
            suite=__version__,
            torch=environment["torch"],
            device=device,
            device_name=environment["device"],
            tier=request.tier.value,
            backends={each.reference: _identity(each) for each in facts},
            capabilities={name: _case_list(request, name) for name in request.capabilities},
            cases=tuple(case.id for case in request.cases),
            explore=str(request.explore),
            shard=request.shard,
            deployment=request.deployment,
            salt=request.salt,
            apart=request.apart,
        )

    @staticmethod
    def recorded(journal: Journal) -> "Plan":
        """The plan that a journal starts with.

        Raises:
            JournalError: there is no journal, or it starts otherwise, or with a plan of another format.
        """
        first = next(journal.events(), None)
        if not isinstance(first, Planned):
            raise JournalError(
                f"{journal.path}: expected a journal that starts with the plan of a run; start the run anew"
            )
        if first.plan.get("format") != PLAN_FORMAT:
            raise JournalError(f"{journal.path}: expected plan format {PLAN_FORMAT}, got {first.plan.get('format')!r}")
        try:
            return msgspec.convert(first.plan, Plan, strict=True)
        except msgspec.ValidationError as error:
            raise JournalError(f"{journal.path}: malformed plan: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    def differences(self, current: "Plan") -> list[str]:
        """What another plan does not agree in, in words."""
        found = []
        for name in Plan.__struct_fields__:
            old, new = getattr(self, name), getattr(current, name)
            if isinstance(old, dict):
                changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                found += [f"{name}: {key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}" for key in changed]
            elif old != new:
                found.append(f"{name}: was {_text(old)}, is {_text(new)}")
        return found


def _identity(facts: BackendFacts) -> str:
    """What tells that a backend is still the same, and the cases that were fitted to it."""
    return f"{facts.fingerprint}, region {facts.region}" if facts.region else facts.fingerprint


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _case_list(request: RunRequest, capability: str) -> str:
    ids = [case.id for case in request.cases_of(capability)]
    return f"{len(ids)} cases {hashlib.sha256(chr(10).join(ids).encode()).hexdigest()[:12]}"
