"""What supervisor and worker say to each other: one JSON line each, a task in, events out."""

import json
import socket
from enum import StrEnum
from typing import Any

import msgspec

from mla_conformance.cases.sharding import Extent
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.driving.loaded import Loaded
from mla_conformance.judging.explored import Explored
from mla_conformance.judging.record import EXPLORED, BackendFacts, Record, RecordKey, Traced
from mla_conformance.judging.traits import Repeated, Traits
from mla_conformance.speed.times import Speed


class Setup(msgspec.Struct, frozen=True):
    device: str  # ``cpu``, ``cuda``, or empty for CUDA where there is one
    memory: int | None = None  # bytes that a worker may allocate; None without a limit
    salt: str = ""  # what inputs are drawn with beside their case; empty for none
    draws: bool = False  # whether cases are to be drawn
    began: float = 0.0  # when the run began, in seconds of the system's clock
    role: str = ""  # the file of one from outside, as PATH@sha256:DIGEST
    array: tuple[str, ...] = ()  # ids of its covering array
    variables: dict[str, str] = {}  # of the environment, for a process that was started before they were known
    times: bool = False  # whether kernels are to be timed


class _AboutBackend(msgspec.Struct, frozen=True, tag_field="kind"):
    reference: str


class Describe(_AboutBackend, frozen=True, tag="describe"):
    cases: tuple[str, ...] = ()  # the id of a case of each role that is to be judged


class Fit(_AboutBackend, frozen=True, tag="fit"):
    """Find cases for the pairs of classes that a backend declares of one role and no listed case holds."""

    capability: str  # whose cases the array is
    triples: int


class Judge(_AboutBackend, frozen=True, tag="judge"):
    case: str
    before: tuple[RecordKey, ...] = ()  # what its process runs first; without a case, a backend is imported only
    fresh: bool = False  # in a process that has judged nothing
    explain: bool = False  # tell, too, what a failure looks like and where its errors are
    unhurried: bool = False  # take the time that comparing with every candidate takes
    reported: tuple[str, ...] = ()  # what other failures look like; only whether this one does, too, is to be told


class Explore(_AboutBackend, frozen=True, tag="explore"):
    """Draw cases of one role, and tell what came of them: one record stands for what all of a backend's tasks find."""

    capability: str  # whose cases the array is
    extent: Extent
    turn: tuple[int, int]  # the number of the first round of draws, and how many rounds further the next one is
    part: int  # its number among those of its backend
    parts: int  # how many there are
    case: str = EXPLORED  # what the record is kept as


class Trace(_AboutBackend, frozen=True, tag="trace"):
    cases: dict[str, str]  # by capability, one that the backend passed


class Examine(_AboutBackend, frozen=True, tag="examine"):
    bitwise: bool
    accuracy: bool


class Repeat(_AboutBackend, frozen=True, tag="repeat"):
    case: str
    calls: int


class TakeTimes(_AboutBackend, frozen=True, tag="take times"):
    forms: tuple[str, ...]  # ids of small cases, best first, in which a right backend is timed


Task = Describe | Fit | Judge | Explore | Trace | Examine | Repeat | TakeTimes
Unrecorded = Describe | Fit | Trace | Examine | Repeat | TakeTimes  # tasks that no record answers


class Given(msgspec.Struct, frozen=True):
    process: int  # of the worker; the next one may find what is left of this where that one died without reading it
    task: Task | None = None  # what is to be done; None to give back what it holds of its GPU for cases to come
    share: int | None = None  # bytes of a GPU that it may take, since others use it as well; None without a limit


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    process: int
    device: str  # where it judges, ``cpu`` or ``cuda``; empty if the one that was asked for is not there
    facts: dict[str, str]  # of the device and of what is installed, for the report
    gpus: tuple[str, ...] = ()  # those that it sees
    memory: int = 0  # bytes of the one that it judges on


class Step(StrEnum):  # what a worker tells of a case before it answers
    STARTED = "started"
    JUDGED = "judged"  # its verdict, whose explanation follows; the backend is not asked anything more
    EXPLORED = "explored"  # what is known of an exploration that goes on


class Told(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    step: Step
    record: Record
    explored: Explored | None = None  # what is known so far of a part of an exploration, and the number of that
    part: int = 0


class Found(msgspec.Struct, frozen=True, omit_defaults=True):  # of a backend or one of its cases, beside verdicts
    traced: Traced | None = None  # what was seen to run
    traits: Traits | None = None  # when bits are the same, and how errors are spread
    speed: Speed | None = None  # times of one that is right
    heat: HeatMap | None = None  # where the errors of a case are

    def joined(self, other: "Found") -> "Found":
        told = {name: value for name in self.__struct_fields__ if (value := getattr(other, name)) is not None}
        return msgspec.structs.replace(self, **told)


class TaskReply(msgspec.Struct, frozen=True, tag_field="kind", tag="answer"):
    record: Record | None = None
    facts: BackendFacts | None = None
    fitted: tuple[str, ...] = ()  # ids of the cases that were asked for
    missing: dict[str, str] = {}  # why no case of a role can be called on what was described
    found: Found = Found()
    explored: Explored | None = None
    repeated: Repeated | None = None
    loaded: Loaded = Loaded()  # code that the process of the backends has loaded and that was not told before
    declared: dict[str, str] = {}  # what the backend declared of a role, in words, where it was asked for
    wants: int = 0  # bytes of a GPU that a case needs and that are not there now, so that nothing was done; else 0
    leaves: bool = False  # this process ends now; the next task is another's


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    status: int  # of a worker's process, or minus the signal, as its parent says; another one follows


WorkerEvent = Hello | Told | TaskReply | Ended


def read_line(connection: socket.socket) -> bytes:
    """One line and not a byte more, which is the next process's; empty at the end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        line += byte
    return line


def encode(message: Any) -> bytes:
    return (json.dumps(msgspec.to_builtins(message)) + "\n").encode("ascii")  # unlike msgspec it writes half a pair


def tell(connection: socket.socket, message: Any) -> None:
    connection.sendall(encode(message))


def decode(line: bytes, form: Any) -> Any:
    return msgspec.convert(json.loads(line), form)
