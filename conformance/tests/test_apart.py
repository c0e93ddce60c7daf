"""Judged apart: what crosses between the processes, what is believed of it, and which verdicts come of it."""

import os
import socket
from functools import partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Instead, StepResult
from mla_conformance.driving.remote import Part, RemoteExecutor, Reply, returned, written
from mla_conformance.driving.shared import Piece, Shared, SharedRange, pack, send, unpack
from mla_conformance.problems.calls import CallOnRanks
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.definition import build_problem

CPU = torch.device("cpu")


def crossed(value: Any) -> tuple[Any, Shared]:
    shared = Shared(2**24)
    return unpack(pack(value, shared), shared, {}), shared


def test_what_operands_mean_and_caches_must_hold_stays_where_the_judge_is() -> None:
    (call,) = build_problem(Case.parse("decode:call=decode;heads=2;q=[1,1];kv=[5,70]"), CPU).calls
    there, _held = crossed(call)
    assert isinstance(there, DecodeCall) and isinstance(call, DecodeCall)
    assert all(getattr(there, name).is_meta for name in ("q", "k", "v")) and there.k.shape == call.k.shape
    assert torch.equal(storage_bytes(there.kv_cache), storage_bytes(call.kv_cache))
    assert there.kv_cache.stride() == call.kv_cache.stride() and there.q_pe.stride() == call.q_pe.stride()
    case = "layer_dcp:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1;ranks=2"
    there, _held = crossed(build_problem(Case.parse(case), CPU))
    (call,) = there.calls
    assert isinstance(call, CallOnRanks) and there.whole is None
    for part in call.parts:
        assert part.image.after.is_meta and all(x.is_meta for x in (*part.image.latents, part.latents, part.v))
        assert torch.equal(storage_bytes(part.image.cache), part.image.before)


def test_a_storage_keeps_its_place_and_a_piece_that_was_too_small_is_used_again(monkeypatch: Any) -> None:
    shared, first, second = Shared(2**20), torch.zeros(9), torch.zeros(9)
    place, behind = shared.place_of(first), shared.place_of(second)
    assert shared.place_of(first[3:]) == place and behind.at > place.at
    del first, second
    shared.sweep()
    third = torch.zeros(4)
    assert shared.place_of(third).at == place.at
    with pytest.raises(MemoryError, match="between two processes"):
        shared.place_of(torch.zeros(2**20))
    shared = Shared(2**20)

    def add(size: int) -> bytes:
        shared.pieces["cuda"].append(Piece(0, size))
        return b""

    monkeypatch.setattr(shared, "add_cuda", add)
    for _ in range(9):
        small, large = shared.room("cuda", 2**20), shared.room("cuda", 2**29)
        assert (small.piece, large.piece) == (0, 1) and small.size < 2**29 <= large.size
    assert shared.room("cuda") == large  # for an answer the largest
    assert len(shared.pieces["cuda"]) == len(shared.openers) == 2


def seen_of(value: Any) -> tuple[Any, Shared]:
    shared = Shared(2**20)
    rooms = {"cpu": shared.room("cpu")}
    reply = msgspec.json.decode(msgspec.json.encode(written(shared, rooms, [], 1, value)), type=Reply)
    return returned(reply, shared, rooms, []), shared


def answered(*frames: bytes) -> StepResult:
    mine, theirs = socket.socketpair()
    for frame in frames:
        send(theirs, frame)
    ended = Mock(side_effect=ChildProcessError("the kernel's process has ended"))
    return RemoteExecutor(mine, Shared(2**20), ended).call(partial(int))


def test_what_is_written_after_the_answer_is_not_in_the_copy() -> None:
    result = torch.arange(24.0).view(4, 6)
    (seen, row), shared = seen_of((result[1:, ::2], result[2]))
    # As any process that maps the memory can do at any time.
    shared.bytes_of(SharedRange("cpu", 0, 0, shared.pieces["cpu"][0].size)).fill_(7)
    assert torch.equal(seen, result[1:, ::2]) and seen.stride() == (6, 2) and torch.equal(row, result[2])


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, Instead("NoneType", "a NoneType", False)),
        ({"output": 1}, Instead("dict", "a dict", False)),
        (torch.ones(2).to_sparse(), Instead("Tensor", "a tensor of layout sparse_coo", True)),
        (torch.nn.Parameter(torch.ones(2)), Instead("Parameter", "a Parameter", True)),
    ],
)
def test_what_is_no_tensor_is_told_by_what_it_is_and_one_without_memory_has_its_form(value: Any, seen: Instead) -> None:
    assert seen_of(value)[0] == seen
    (empty, meta), _ = seen_of([torch.ones(0, 3), torch.ones(2, 3, device="meta")])
    assert empty.shape == (0, 3) and meta.is_meta and meta.shape == (2, 3)


PART = {"kind": "Tensor", "is_tensor": True, "dtype": "float32", "shape": [2], "strides": [1]}
PART |= {"place": ["cpu", 0, 0, 8]}

CHANGES: list[dict[str, Any]] = [
    *({"place": place} for place in (["cpu", 0, 2**20 - 4, 8], ["cuda", 0, 0, 8], ["cpu", 1, 0, 8], ["cpu", 0, -8, 8])),
    *({"place": ["cpu", 0, 0, 4]}, {"shape": [2, 2]}, {"offset": 2}, {"dtype": "float31"}, {"dtype": "Tensor"}),
    *({"shape": [2**40], "strides": [2**40]}, {"shape": [2**40, 2**40], "strides": [0, 0]}, {"verdict": "pass"}),
    *({"of": 0, "place": None}, {"of": -1, "place": None}, {"kind": "x" * 3000}),
    {"place": None, "shape": [2**40, 2**40], "strides": [1, 1]},
]
NO_ANSWERS = [msgspec.json.encode({"number": 1, "parts": [PART | change]}) for change in CHANGES]
NO_ANSWERS += [b"null", b"[" * 100_000, b'{"number":8}', b"\xff", b'{"number":1,"error":3}']
NO_ANSWERS += [b'{"number":1,"needs":{"tpu":1}}']


@pytest.mark.parametrize("data", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
def test_an_answer_that_cannot_be_is_refused(data: bytes) -> None:
    assert answered(msgspec.json.encode({"number": 1, "parts": [PART]})).value.shape == (2,)
    done = answered(data)
    assert done.error.startswith("malformed reply from the kernel process: ") and done.value is None


def test_a_judge_without_room_for_a_copy_does_not_blame_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_strided", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(torch.OutOfMemoryError):
        returned(Reply(1, parts=(Part("Tensor", "", True, "float32", (2,), (1,)),)), Shared(2**20), {}, [])


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_an_answer_asks_for_is_no_more_than_there_is(monkeypatch: Any, refused: bool) -> None:
    """Whether it is not there, or the driver refuses it: the kernel's own call ran out of memory."""
    room = Shared.room

    def refusing(shared: Shared, kind: str, size: int = 0) -> SharedRange:
        if refused and size > 1:
            raise MemoryError(f"{size} bytes")
        return room(shared, kind, size)

    monkeypatch.setattr(Shared, "room", refusing)
    done = answered(*(msgspec.json.encode(Reply(number, needs={"cpu": 2**47})) for number in (1, 2)))
    assert done.out_of_memory and ("no room" in done.error) is not refused


def test_the_end_of_the_kernels_process_is_seen_although_another_holds_its_connection() -> None:
    (mine, _held), (end, other) = socket.socketpair(), os.pipe()
    os.close(other)
    ended = Mock(side_effect=ChildProcessError("the kernel's process has ended"))
    with pytest.raises(ChildProcessError):
        RemoteExecutor(mine, Shared(2**20), ended, [end]).query(partial(int))
    os.close(end)
