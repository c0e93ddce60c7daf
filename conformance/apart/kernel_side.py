"""The process that imports a backend, asks it and calls it; of a problem it knows what a backend is handed."""

import pickle
import socket
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import torch

from mla_conformance.apart.packing import Unpacker
from mla_conformance.apart.reply import LONGEST_REPLY, Reply, Writer, reply_of
from mla_conformance.apart.shared import Shared, SharedRange, receive, send
from mla_conformance.driving.executor import StepResult, run_step
from mla_conformance.problems.memory import device_lost
from mla_conformance.trials.subject import Subject


class Wanted(Enum):
    """What the judge wants to know of a step's value."""

    RETURNED = "returned"
    """Its tensors."""
    FACT = "fact"
    """Plain data."""
    NOTHING = "nothing"


class KernelRequest(msgspec.Struct, frozen=True):
    """A step to carry out.

    Attributes:
        number: of the request; what the step makes is kept under it.
        step: packed.
        wanted: what is to be answered.
        released: numbers of what is kept for no later step.
        openers: of pieces of the GPU's memory.
        rooms: what is free for the answer.
        reached: places of what the step may write.
    """

    number: int
    step: bytes
    wanted: Wanted
    released: list[int]
    openers: list[bytes]
    rooms: list[SharedRange]
    reached: list[SharedRange]

    @property
    def keeps(self) -> bool:
        """Whether later steps are given the value."""
        return self.wanted is not Wanted.FACT


def serve(connection: socket.socket, shared: Shared) -> None:
    """Hear where backends are judged, then carry out steps until the other end is closed."""
    if frame := receive(connection):
        device = pickle.loads(frame)
        shared.use(device)
        KernelSide(shared, device).serve(connection)


class KernelSide:
    """Carries out the steps of one judge after the other.

    Args:
        shared: the memory.
        device: where backends are judged.
    """

    def __init__(self, shared: Shared, device: torch.device) -> None:
        self._shared, self._device = shared, device
        self._kept: dict[int, Any] = {}
        self._subjects: dict[str, Subject] = {}

    def serve(self, connection: socket.socket) -> None:
        """Answer until the other end is closed."""
        while frame := receive(connection):
            send(connection, self.answer(pickle.loads(frame)))

    def answer(self, request: KernelRequest) -> bytes:
        """Carry out a step; the reply to it."""
        for number in request.released:
            self._kept.pop(number, None)
        for opener in request.openers:
            self._shared.open_cuda(opener)
        reply = self._carried_out(request)
        data = msgspec.json.encode(reply)
        if len(data) > LONGEST_REPLY:
            error = f"ValueError: an answer of {len(data)} bytes, at most {LONGEST_REPLY} are taken"
            data = msgspec.json.encode(reply_of(request.number, StepResult(error=error)))
        return data

    def _carried_out(self, request: KernelRequest) -> Reply:
        done = run_step(partial(self._told, request))
        if done.error:
            return msgspec.structs.replace(reply_of(request.number, done), lost=device_lost(self._device))
        return msgspec.structs.replace(done.value, disturbed=reply_of(request.number, done).disturbed)

    def _told(self, request: KernelRequest) -> Reply:
        value = _StepUnpacker(request.step, self).load()()
        if request.keeps:
            self._kept[request.number] = value
        if request.wanted is Wanted.FACT:
            return Reply(request.number, fact=msgspec.Raw(msgspec.json.encode(value)))
        reply = Reply(request.number)
        if request.wanted is Wanted.RETURNED:
            reply = Writer(self._shared, request.rooms, request.reached).reported(request.number, value)
        self._shared.synchronize()
        return reply

    def kept(self, number: int) -> Any:
        """What an earlier step left."""
        return self._kept[number]

    def subject(self, reference: str) -> Subject:
        """A backend, imported at its first question."""
        if reference not in self._subjects:
            self._subjects[reference] = Subject.of(reference, self._device)
        return self._subjects[reference]


class _StepUnpacker(Unpacker):
    def __init__(self, data: bytes, side: KernelSide) -> None:
        super().__init__(data, side._shared)
        self._side = side

    def persistent_load(self, reported: Any) -> Any:
        """A tensor, what an earlier step left, or a backend."""
        what, *rest = reported
        if what == "kept":
            return self._side.kept(*rest)
        return self._side.subject(*rest) if what == "subject" else super().persistent_load(reported)
