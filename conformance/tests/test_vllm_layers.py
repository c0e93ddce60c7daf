"""Layers driven by others: backends of an installed vLLM, unchanged, and one on two processes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.roles import Role
from mla_conformance.distributed import main
from mla_conformance.judging.record import Record, Status
from mla_conformance.tests import fake_vllm as fake
from mla_conformance.tests.drawn import judged as judged_on
from mla_conformance.tests.drawn import subject_of
from mla_conformance.trials.facts import describe

BACKENDS = "vllm.v1.attention.backends.mla.fake"
SMALL = "call=layer;dims=32-16-32-64;heads=2"
PREFILLS_FIRST = f"mixed_batch:{SMALL};q=[5,9,1];kv=[40,0,130];decodes=1;data=needle;workspace=64"
BEHIND = f"{SMALL};q=[1,1,20];kv=[33,7,40];decodes=2;order=decodes_first"
DECODES_FIRST = f"mixed_batch:{BEHIND};layers=3;layout=sliced;pad=2"


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    def judge(case: str, backend: type = fake.MLACommonBackend) -> Record:
        fake.install(monkeypatch, {**fake.LAYER, BACKENDS: {"Backend": backend}})
        return judged_on(f"{BACKENDS}:Backend", case)

    return judge


@pytest.mark.parametrize(
    "case",
    [
        *(PREFILLS_FIRST, DECODES_FIRST),
        f"mixed_batch:{SMALL};q=[3,3,9];kv=[30,4,64];decodes=2;order=decodes_first;weights=dense",
        f"weight_absorption:{SMALL};q=[5,1];kv=[20,33];decodes=1",
        f"graph_padding:{SMALL};q=[1,1];kv=[40,16];decodes=2;pad=3",
        f"call_order:{SMALL};q=[5,9,1];kv=[40,0,130];decodes=1;workspace=64;model=1;layout=packed",
        f"call_order:{BEHIND};model=1;layout=sliced",
    ],
)
def test_an_unchanged_backend_passes_as_a_layer(case: str, judged: Any) -> None:
    found = judged(case)
    assert found.status is Status.PASS, found.message
    assert found.evidence["decode"].endswith("fake_vllm.Impl")
    subject = subject_of(f"{BACKENDS}:Backend")
    assert subject.roles == (Role.LAYER,)
    assert any("reordered" in adapter for _, adapter in describe(subject).deviations)


def test_a_decode_that_misses_its_newest_key_and_a_prefill_that_drops_its_context_fail(judged: Any) -> None:
    class Late(fake.Impl):
        def forward_mqa(self, q: Any, entries: Any, rank: int) -> Any:
            return super().forward_mqa(q, entries[:-1], rank)

    class Forgetful(fake.Impl):
        def forward_mha(self, q: Any, kv_c: Any, k_pe: Any) -> Any:
            return super().forward_mha(q, kv_c[-len(q) :], k_pe[-len(q) :])

    for case, impl in ((PREFILLS_FIRST, Late), (DECODES_FIRST, Late), (PREFILLS_FIRST, Forgetful)):
        wrong = type("Wrong", (fake.MLACommonBackend,), {"get_impl_cls": staticmethod(lambda impl=impl: impl)})
        found = judged(case, wrong)
        said = "output" if impl is Late else "request 0"
        assert (found.status, said in found.message) == (Status.FAIL, True)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (f"cache_write:{SMALL};q=[5,1];kv=[12,15];decodes=1", "no get_kv_cache_shape, copy_blocks, swap_blocks"),
        (f"graph_replay:{SMALL};q=[1,1];kv=[12,15];decodes=2", "no get_state_cls"),
        (f"layer_dcp:{SMALL};q=[1,1];kv=[12,15];decodes=2;ranks=2", "ranks that share tokens not declared"),
        (f"mixed_batch:{SMALL};q=[5,1];kv=[12,15];decodes=1;out=1", "output buffer not declared"),
        (f"graph_padding:{SMALL};q=[5,1];kv=[12,15];decodes=1;pad=2", "rows of padding behind prefills"),
        (f"mixed_batch:{SMALL};q=[5,1];kv=[12,15];decodes=1;page=1", "pages of 1 tokens"),
        (f"mixed_batch:{SMALL};q=[5,1];kv=[12,15];decodes=1;dtype=fp32", "dtype not supported"),
        ("mixed_batch:call=layer;dims=32-16-32-640;q=[1];kv=[9];decodes=1", "head size 656 not supported"),
        (f"mixed_batch:{SMALL};q=[1,1];kv=[12,15];decodes=1;cache=fp8", "takes for a prefill"),
    ],
)
def test_what_has_no_place_in_its_generation_is_unsupported(case: str, said: str, judged: Any) -> None:
    found = judged(case)
    assert found.status is Status.UNSUPPORTED, found.message
    assert said in found.message


def test_decodes_are_driven_where_there_is_no_prefill_backend(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake.STATE, "prefill", False)
    found = judged(PREFILLS_FIRST)
    assert (found.status, "No valid MLA prefill" in found.message) == (Status.UNSUPPORTED, True)
    assert judged(f"mixed_batch:{SMALL};q=[1,1];kv=[40,16];decodes=2").status is Status.PASS


SCRIPT = """
import sys
import torch
from mla_conformance.distributed import judge_ranks
rank, rendezvous, *backends = sys.argv[1:]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
print([judge_ranks(backend, torch.device("cpu")) for backend in backends])
torch.distributed.destroy_process_group()
"""


def test_processes_that_share_the_tokens_give_what_one_would(tmp_path: Path, python: Path) -> None:
    given = (str(tmp_path / "rendezvous"), "EAGER", "mla_conformance.tests.test_layer:SilentSecond")
    calls = ([str(python), "-c", SCRIPT, str(rank), *given] for rank in range(2))
    ranks = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for call in calls]
    first, second = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and second == [first[-1]] == ["[0, 1]"]
    assert first[0].startswith("EAGER · 2 processes through gloo · cpu · torch ") and "4 pass" in first
    prefills = [line for line in first if line.startswith("pass, ") and "decodes=" not in line]
    assert any("kv=[40,0,131]" in line for line in prefills)
    assert any(": on rank 1, the entry of slot " in line for line in first)


def test_without_torchrun_it_says_what_is_expected(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--backend", "EAGER"])
    assert ended.value.code == 2 and "expected to be one of the processes of torchrun" in capsys.readouterr().err
