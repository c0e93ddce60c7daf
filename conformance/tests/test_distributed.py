"""A layer on two processes: judged like one in lockstep, and what the other process does wrong is seen."""

import subprocess
import sys
from pathlib import Path

import pytest

from mla_conformance.distributed import main

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
WRONG = """
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer


class SilentSecond(EagerLayer):
    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, *operands):
            if self.dcp_rank != 1:
                super().do_kv_cache_update(*operands)
"""


def test_processes_that_share_the_tokens_give_what_one_would(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    given = (str(tmp_path / "rendezvous"), "EAGER", f"{tmp_path / 'wrong.py'}:SilentSecond")
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), *given], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and second == [first[-1]] == ["[0, 1]"]
    assert first[0].startswith("EAGER · 2 processes through gloo · cpu · torch ") and "7 pass" in first
    prefills = [line for line in first if line.startswith("pass, ") and "decodes=" not in line]
    assert any("kv=[40,0,131]" in line for line in prefills)
    assert any(": on rank 1, the entry of slot " in line for line in first)


def test_without_torchrun_it_says_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--backend", "EAGER"])
    assert ended.value.code == 2 and "expected to be one of the processes of torchrun" in capsys.readouterr().err
