"""What a run shares out among its workers: GPUs, groups of cases, and a GPU's memory."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.cases.case import Case
from mla_conformance.driving.device_needs import device_reasons
from mla_conformance.driving.reach import needed_bytes
from mla_conformance.driving.subject import Subject
from mla_conformance.isolation.devices import VISIBLE, jit_caches, take_place, use_gpu, use_jit_cache, visible_gpus
from mla_conformance.judging.needs import memory_need
from mla_conformance.judging.verdict import Nonconformance, Status
from mla_conformance.problems.memory import wait_for_memory
from mla_conformance.running.certify import Run, default_workers
from mla_conformance.running.selection import Selection
from mla_conformance.trials.trial import Trial

CUDA = torch.device("cuda")
HOLD = """
import sys, pathlib
from mla_conformance.isolation.devices import take_place
print(take_place(pathlib.Path(sys.argv[1]), 3), flush=True)
sys.stdin.read()
"""


TELLS = """
import os, time
from mla_conformance.backends.eager import EagerPrefillBackend

class Tells(EagerPrefillBackend):
    def prepare_metadata(self, metadata):
        time.sleep(0.2)
        super().prepare_metadata(metadata)

    def kernel_evidence(self):
        return {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "jit": os.environ["TRITON_CACHE_DIR"]}
"""


def worker(folder: Path) -> "tuple[subprocess.Popen[str], int]":
    """A process that has taken a place, and which."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, int(process.stdout.readline())


def test_a_worker_takes_the_place_that_a_dead_one_leaves(tmp_path: Path) -> None:
    workers = [worker(tmp_path) for _ in range(3)]
    try:
        assert sorted(place for _, place in workers) == [0, 1, 2]
        workers[1][0].kill()
        workers[1][0].wait()
        workers.append(worker(tmp_path))
        assert workers[3][1] == workers[1][1]
    finally:
        for process, _ in workers:
            process.kill()
            process.communicate()


def test_more_workers_than_gpus_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    taken = []
    for _ in range(3):
        use_gpu(take_place(tmp_path, 3), ("4", "GPU-7"))
        taken.append(os.environ[VISIBLE])
    assert taken == ["4", "GPU-7", "4"]


def test_a_worker_compiles_into_a_folder_of_its_own_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"TRITON_CACHE_DIR": "mine", "XDG_CACHE_HOME": str(tmp_path)})
    use_jit_cache(jit_caches(["FLASHINFER[fa3]"]) / "2")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    workspace = tmp_path / "mla-conformance" / "jit" / "FLASHINFER[fa3]" / "2" / "flashinfer_workspace_base"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(workspace)
    assert len({jit_caches(names) for names in (["A"], ["B"], ["A", "B"])}) == 3


def test_a_place_is_shared_rather_than_waited_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_conformance.isolation.devices._PATIENCE", 0.3)
    assert take_place(tmp_path, 1) == take_place(tmp_path, 1) == 0


@pytest.mark.parametrize(
    ("named", "found"), [("", ("0", "1")), ("3,5,7", ("3", "5")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b"))]
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, named: str, found: tuple[str, ...]) -> None:
    monkeypatch.setenv(VISIBLE, named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == found


def test_workers_on_gpus_have_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)
    selection = Selection.of(["EAGER"], ["lse"], "smoke", "cpu", [])
    object.__setattr__(selection, "device", CUDA)
    assert default_workers(selection) == 4
    command = Run(selection, tmp_path, workers=4)._command()
    assert {"--mla-gpus=0,1,2,3", f"--mla-jit={jit_caches(['EAGER'])}"} <= set(command)
    alone = Run(selection, tmp_path, workers=1)._command()
    assert not any(argument.startswith(("--mla-gpus", "--mla-jit")) for argument in alone)


def test_every_worker_of_a_run_has_its_own(tmp_path: Path) -> None:
    """Played on the CPU: a backend tells what its process was given."""
    source = tmp_path / "tells.py"
    source.write_text(TELLS)
    selection = Selection.of([f"{source}:Tells"], ["lse"], "full", "cpu", [])
    options = ["--mla-gpus=5,6", f"--mla-jit={tmp_path / 'jit'}"]
    run = Run(selection, tmp_path, workers=2, extra=options)
    run.execute(lambda record: None)
    (tells,) = run.summary().backends
    found = {
        (evidence["gpu"], Path(evidence["jit"]).relative_to(tmp_path / "jit").parts[0]) for evidence in tells.evidence
    }
    assert found == {("5", "0"), ("6", "1")}


def test_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10, 20, 30])
    monkeypatch.setattr("mla_conformance.problems.memory.free_memory", lambda device: next(free))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert wait_for_memory(CUDA, 25, 60) == 30


def test_a_case_without_its_memory_is_unavailable_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_conformance.problems.memory.free_memory", lambda device: 2**20)
    trial = Trial(Subject.of("EAGER", CUDA), CAPABILITIES["lse"].cases[0])
    with pytest.raises(Nonconformance, match=r"out of memory: may need \d+ MiB, 1 MiB are free after 0 s"):
        trial.require_memory(0)
    assert trial.verdict.status is Status.UNAVAILABLE


def test_the_need_grows_with_the_case() -> None:
    small, large = (memory_need(Case.of(capability="lse", q=(tokens,)), "cuda") for tokens in (1, 100_000))
    assert 2**28 < small < 2**29 < large


def test_far_operands_want_a_large_device_and_wait_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Case.of(capability="large_offsets", call="context_chunk", dims="small", q=(40,), kv=(40,), heads=2, far="k32")
    near = replace(far, capability="context_chunk", far="none")
    assert memory_need(far, "cuda") - memory_need(near, "cuda") == needed_bytes(far)
    device = SimpleNamespace(total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert device_reasons(far, CUDA, EagerPrefillBackend) == []
    device.total_memory = 8 << 30
    told = "needs a device with 18 GiB of memory, this one has 8 GiB"
    assert device_reasons(far, CUDA, EagerPrefillBackend) == [told]
