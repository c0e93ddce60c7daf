"""Operands at the edges of memory: what touches memory beside them is found by name, nothing else is."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.roles import role_of
from mla_conformance.cases.case import Case
from mla_conformance.defects.bounds import end, reads
from mla_conformance.defects.known import KnownDefect, known_defects
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems import rooms
from mla_conformance.problems.rooms import ZONE, CpuRoom, noted_faults, touched_rooms
from mla_conformance.tests.drawn import judged
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = CAPABILITIES["memory_bounds"].cases
DEFECTS = [entry for entry in known_defects().values() if entry.killed_by == "memory_bounds"]


@pytest.mark.parametrize("entry", DEFECTS, ids=lambda entry: entry.id)
def test_a_defect_is_found_by_the_operand_and_its_side(entry: KnownDefect) -> None:
    records = [judged(entry.reference, case) for case in CASES if case.role in entry.roles]
    failed = [record for record in records if record.failed]
    assert failed and all(record.check == Check.OUT_OF_BOUNDS for record in failed)
    verb = "writes" if "-writes-" in entry.id else "reads"
    side = "before the beginning of" if "before" in entry.id else "behind the end of"
    assert all(f"{verb} byte " in record.message and side in record.message for record in failed)


class WindowBehindTheLast(EagerTopKBackend):
    def prepare_metadata(self, metadata: Any) -> None:
        for x in (metadata.lengths, metadata.row_starts):
            if x is not None:
                reads(x, end(x), 1)
        super().prepare_metadata(metadata)


class BiasBehindTheLast(EagerPrepareBackend):
    def run_prepare_index(self, *operands: torch.Tensor) -> Any:
        reads(operands[4], end(operands[4]), 1)
        return super().run_prepare_index(*operands)


class PageBehindTheTable(EagerCacheBackend):
    def run_gather_latent(self, **operands: Any) -> None:  # type: ignore[override]
        reads(operands["block_table"], end(operands["block_table"]), 1)
        super().run_gather_latent(**operands)


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        (WindowBehindTheLast, ("lengths", "row starts")),
        (BiasBehindTheLast, ("norm_bias",)),
        (PageBehindTheTable, ("block_table",)),
    ],
)
def test_what_stands_beside_an_attention_is_fenced_too(kernel: type, named: tuple[str, ...]) -> None:
    records = [judged(kernel, case) for case in CASES if case.role is role_of(kernel)]
    said = " ".join(record.message for record in records if record.check == Check.OUT_OF_BOUNDS)
    assert all(f"behind the end of {name} of " in said for name in named)


def test_a_right_kernel_is_right_at_the_edges() -> None:
    one_of_each_role = {case.role: case for case in CASES}.values()
    assert {judged("EAGER", case).status for case in one_of_each_role} == {Status.PASS}


def test_a_fault_in_an_operation_on_several_threads_is_noted() -> None:
    room = CpuRoom("operand", 2**20)
    with noted_faults():
        beyond = _over(room, room.capacity + ZONE)
        assert int(beyond.sum(dtype=torch.int64)) == 0
        assert [zone.access for zone in room.zones] == ["", "reads"]
        beyond[-1] = 1
    assert [zone.access for zone in room.zones] == ["", "writes"]
    assert [each.name for each in touched_rooms()] == ["operand"]
    assert not list(touched_rooms())


def test_another_fault_ends_the_process_as_ever() -> None:
    code = (
        "import ctypes; from mla_conformance.problems.rooms import noted_faults\n"
        "with noted_faults():\n    ctypes.string_at(8)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == -11


def test_a_process_of_its_own_names_the_operand_that_a_gpu_would_not() -> None:
    case = next(case for case in CASES if case.call == "decode")
    told = [known_defects()["decode-reads-a-page-behind-the-cache"].reference, "cpu", Case.parse(case.id).id, "", "end"]
    command = [sys.executable, "-m", "mla_conformance.trials.bounds", *told]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "kv_cache of decode"


def _over(room: CpuRoom, size: int) -> torch.Tensor:
    """The bytes of a room, and the zone behind them."""
    return torch.frombuffer((ctypes.c_char * size).from_address(room.part(0, 1).data_ptr()), dtype=torch.uint8)


def test_a_full_gpu_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuMemCreate=lambda: 2, cuMemMap=lambda: 700)
    monkeypatch.setattr(rooms, "_library", lambda: driver)
    with pytest.raises(MemoryError, match="cuMemCreate returned CUresult 2"):
        rooms._driver("cuMemCreate")
    with pytest.raises(RuntimeError, match="cuMemMap returned CUresult 700"):
        rooms._driver("cuMemMap")


ON_A_GPU = """
import torch
from mla_conformance.problems.rooms import CudaRoom
torch.special.airy_ai(torch.zeros(1, device="cuda"))  # compiled at run time: torch has loaded NVRTC then
source = 'extern "C" __global__ void read(char *p, int at, char *out) {{ *out = p[at]; }}'
read = torch.cuda._compile_kernel(source, "read")
room, out = CudaRoom(100), torch.zeros(1, dtype=torch.uint8, device="cuda")
inside = room.part(0, room.capacity).fill_(1)
assert inside.data_ptr() % 16 == 0 and int(inside.sum()) == room.capacity
for at in (0, room.capacity - 1):
    read(args=[inside, at, out.zero_()])
    assert int(out) == 1
try:
    read(args=[inside, {first}, out])
    torch.cuda.synchronize()
except RuntimeError as error:
    print("fault", error)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("first", ["room.capacity", "-1"])
def test_a_gpu_faults_beside_its_room(first: str) -> None:
    command = [sys.executable, "-c", ON_A_GPU.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.startswith("fault") and "illegal" in done.stdout
