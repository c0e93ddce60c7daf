"""Many calls of one case: what is rare is found and counted, what is right is not suspected."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects import races
from mla_conformance.judging.traits import Repeated
from mla_conformance.traits.repeats import repeated
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject

PREFILL = "determinism:dims=small;heads=2;q=[33,5]"
DECODE = "determinism:call=decode;dims=small;heads=2;q=[1,1];kv=[130,40];page=64"


def of(reference: str, case: str, calls: int) -> Repeated:
    return repeated(Subject.of(reference, torch.device("cpu")), Context(), Case.parse(case), calls)


def test_a_race_with_wrong_results_is_found_where_the_draw_puts_it() -> None:
    found = of(f"{races.__name__}:UnfinishedTile", DECODE, 400)
    assert found.differing and found.breaks and "output is" in found.wrong
    assert found.first <= 400 and found.calls_for(0.95) > 1


def test_another_order_of_additions_is_right_with_other_bits() -> None:
    found = of(f"{races.__name__}:OrderOfAdditions", PREFILL, 200)
    assert found.differing and not found.wrong and found.breaks


def test_a_kernel_without_a_race_has_the_same_bits() -> None:
    for reference, case in (("EAGER", PREFILL), ("TORCH_SDPA", DECODE)):
        found = of(reference, case, 50)
        assert (found.differing, found.breaks, found.failed) == (0, False, "")


KERNELS = """
import threading
from mla_conformance.backends.eager import EagerPrefillBackend

class Crowded(EagerPrefillBackend):
    def _batch(self, *operands, **options):
        output, lse = super()._batch(*operands, **options)
        return output * (1.5 if threading.active_count() > THREADS else 1.0), lse

class Remembers(EagerPrefillBackend):
    shape = None
    def prepare_metadata(self, prefill):
        self.before, self.shape = self.shape, prefill.query_start_loc.tolist()
        super().prepare_metadata(prefill)
    def _batch(self, *operands, **options):
        output, lse = super()._batch(*operands, **options)
        return output * (1.0 if self.before in (None, self.shape) else 1.5), lse
"""


@pytest.mark.parametrize(
    ("kernel", "numbers", "where"),
    [
        ("Crowded", range(18, 34), "beside other streams or threads"),
        ("Remembers", range(34, 50), "between calls of another batch"),
    ],
)
def test_what_else_goes_on_is_part_of_what_is_found(tmp_path: Path, kernel: str, numbers: range, where: str) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS.replace("THREADS", str(threading.active_count())))
    found = of(f"{tmp_path}/kernels.py:{kernel}", PREFILL, 60)
    assert found.first in numbers and found.what.endswith(where) and "output is" in found.wrong


def test_what_is_always_wrong_or_returns_nothing_is_not_repeated() -> None:
    case = "decode_lse:call=decode;dims=small;heads=2;q=[1];kv=[40]"
    assert "LSE" in of("mla_conformance.defects.decodes:lse_base2_dcp_combine_flashinfer_mla", case, 5).failed
    assert "return nothing to compare" in of("EAGER", "slot_mapping:q=[40,5,9];kv=[10,100,0];page=16", 5).failed


def test_figures() -> None:
    found = Repeated(calls=1000, seconds=2.0, differing=10, first=3)
    assert found.calls_for(0.95) == 299
    assert Repeated(calls=1000).rarest(0.95) == pytest.approx(0.003, rel=0.01)
    assert not Repeated(calls=5, differing=1, deterministic=False).breaks


def test_the_command_keeps_the_smallest_case(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["replay", PREFILL, "--backend", f"{races.__name__}:OrderOfAdditions", "--device", "cpu", "--repeats", "150"]
    assert main(said) == 1
    out = capsys.readouterr().out
    assert "have other bits than the first" in out and "smallest case that differs" in out
    assert list(tmp_path.rglob("race-*.json"))
