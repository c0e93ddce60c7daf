"""Operands at the edges of memory: what touches memory beside them, or changes what was handed, is found by name."""

import ctypes
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.roles import role_of
from mla_conformance.cases.case import Case
from mla_conformance.defects.bounds import end, reads
from mla_conformance.defects.known import known_defects
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.problems import fences
from mla_conformance.problems.fences import ZONE, CpuRoom, noted_faults, touched_rooms
from mla_conformance.tests.drawn import changed, judged
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = CAPABILITIES["memory_bounds"].cases


def reading(base: type, method: str, touched: Callable[..., Any]) -> type:
    def step(run: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        for x in touched(*operands, **options):
            if x is not None:
                reads(x, end(x), 1)
        return run(*operands, **options)

    return changed(base, **{method: step})


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        (reading(EagerTopKBackend, "prepare_metadata", lambda x: (x.lengths, x.row_starts)), ("lengths", "row starts")),
        (reading(EagerPrepareBackend, "run_prepare_index", lambda *x: [x[4]]), ("norm_bias",)),
        (reading(EagerCacheBackend, "run_gather_latent", lambda **x: [x["block_table"]]), ("block_table",)),
    ],
)
def test_what_stands_beside_an_attention_is_fenced_too(kernel: type, named: tuple[str, ...]) -> None:
    records = [judged(kernel, case) for case in CASES if case.role is role_of(kernel)]
    said = " ".join(record.message for record in records if record.check == Check.OUT_OF_BOUNDS)
    assert all(f"behind the end of {name} of " in said for name in named)


def test_a_fault_in_an_operation_is_noted_and_another_ends_the_process_as_ever() -> None:
    room = CpuRoom("operand", 2**20)
    whole = (ctypes.c_char * (room.capacity + ZONE)).from_address(room.part(0, 1).data_ptr())
    with noted_faults():
        beyond = torch.frombuffer(whole, dtype=torch.uint8)  # the bytes of the room, and the zone behind them
        assert int(beyond.sum(dtype=torch.int64)) == 0
        assert [zone.access for zone in room.zones] == ["", "reads"]
        beyond[-1] = 1
    assert [zone.access for zone in room.zones] == ["", "writes"]
    assert [each.name for each in touched_rooms()] == ["operand"]
    assert not list(touched_rooms())
    child = os.fork()
    if not child:
        with noted_faults():
            ctypes.string_at(8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11


def test_a_process_of_its_own_names_the_operand_and_a_full_gpu_is_no_fault(python: Path, monkeypatch: Any) -> None:
    case = next(case for case in CASES if case.call == "decode")
    told = [known_defects()["decode-reads-a-page-behind-the-cache"].reference, "cpu", Case.parse(case.id).id, "", "end"]
    command = [str(python), "-m", "mla_conformance.trials.bounds", *told]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "kv_cache of decode"
    driver = SimpleNamespace(cuMemCreate=lambda: 2, cuMemMap=lambda: 700)
    monkeypatch.setattr(fences, "_library", lambda: driver)
    with pytest.raises(MemoryError, match="cuMemCreate returned CUresult 2"):
        fences._driver("cuMemCreate")
    with pytest.raises(RuntimeError, match="cuMemMap returned CUresult 700"):
        fences._driver("cuMemMap")


ON_A_GPU = """
import torch
from mla_conformance.problems.fences import CudaRoom
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


PLAIN, CONTEXT = "new_tokens:dims=small;q=[5,3]", "chunked_context:dims=small;q=[5,3];kv=[40,3];workspace=32"
OUT, SLICED = "out_tensor:dims=small;q=[5,3];out=1", "strided_inputs:dims=small;q=[5,3];layout=sliced"
Operands = namedtuple("Operands", "q k v out metadata")


def judged_with(text: str, touch: Callable[[Operands], object]) -> Record:
    def step(run: Any, q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        found = run(q, k, v, *arguments, **options)
        touch(Operands(q, k, v, options.get("out"), run.args[0]._prefill_metadata))
        return found

    return judged(changed(EagerPrefillBackend, run_prefill_new_tokens=step), text)


def replaces(name: str, value: Callable[[Any], Any]) -> Callable[[Operands], object]:
    owner, _, field = name.rpartition(".")

    def replace(operands: Operands) -> None:
        part = getattr(operands.metadata, owner) if owner else operands.metadata
        setattr(part, field, value(getattr(part, field)))

    return replace


def clear(x: torch.Tensor, place: int) -> None:
    x.as_strided((1,), (1,), x.storage_offset() + place).zero_()


FORMS = {
    "beside, before v": ("strided_inputs:dims=small;q=[5,3];layout=kv_b_proj", lambda o: clear(o.v, -1), ""),
    "beside, behind q": (SLICED, lambda o: clear(o.q, o.q.shape[-1]), ""),
    "beside, behind k": (SLICED, lambda o: clear(o.k, o.k.shape[-1]), ""),
    "resized": (PLAIN, lambda o: o.q.resize_(2, 4, 16), "shape of q of new tokens was "),
    "grown": (PLAIN, lambda o: o.v.untyped_storage().resize_(2**16), "bytes of v of new tokens was "),
    "restrided": (PLAIN, lambda o: o.q.as_strided_(o.q.shape, (0, 0, 1)), "strides of q of new tokens was "),
    "learning": (PLAIN, lambda o: o.q.requires_grad_(), "requires_grad of q of new tokens was False, is True"),
    "another": (PLAIN, lambda o: o.k.set_(o.k.clone()), "address of k of new tokens was "),
    "data": (PLAIN, lambda o: setattr(o.v, "data", o.v.double()), "dtype of v of new tokens was "),
    "out resized": (OUT, lambda o: o.out.unsqueeze_(0), "shape of out was "),
    "out learning": (OUT, lambda o: o.out.requires_grad_(), "requires_grad of out was False"),
    "metadata tensor": (PLAIN, replaces("query_start_loc", torch.clone), "metadata.query_start_loc was replaced"),
    "metadata length": (PLAIN, replaces("max_query_len", lambda old: old + 1), "metadata.max_query_len was replaced"),
    "plan tensor": (CONTEXT, replaces("chunked_context.starts", torch.clone), "chunked_context.starts was replaced"),
    "plan list": (CONTEXT, lambda o: o.metadata.chunked_context.seq_tot.append(1), "chunked_context.seq_tot was re"),
}


@pytest.mark.parametrize(("case", "touch", "said"), FORMS.values(), ids=FORMS)
def test_what_a_call_does_to_its_operands_is_its_failure(case: str, touch: Any, said: str) -> None:
    record = judged_with(case, touch)
    assert record.status is Status.FAIL and record.check in (Check.PROCESS_STATE, Check.MUTATED_INPUT), record.detail
    assert said in record.message and (said or record.check == Check.MUTATED_INPUT)


def test_what_a_library_hangs_on_metadata_is_no_change() -> None:
    assert judged_with(PLAIN, lambda o: setattr(o.metadata, "wrapper", object())).status is Status.PASS
