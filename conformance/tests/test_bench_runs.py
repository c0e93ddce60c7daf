"""The benchmark of runs: which runs it makes, which it counts, and what it says of their verdicts."""

from typing import Any

import pytest
import torch

from mla_conformance.bench import runs
from mla_conformance.bench.runs import Measurement, compare_runs
from mla_conformance.cli import main
from mla_conformance.engine.request import RunRequest
from mla_conformance.judging.verdict import Status
from mla_conformance.vocabulary.capabilities import Tier, find_capability

LONG, JUDGING = "as long in all", "as long from the first verdict to the last"
LISTED = len(find_capability("lse").select(Tier.SMOKE))


def played(monkeypatch: pytest.MonkeyPatch, cores: int, *measured: Measurement) -> list[tuple[list[str], int]]:
    """Have runs take and judge what is given; returns the backends and workers of each, as they are made."""
    made: list[tuple[list[str], int]] = []
    left = iter(measured)

    def run(request: RunRequest, workers: int) -> Measurement:
        made.append(([backend.name for backend in request.backends], workers))
        return next(left)

    monkeypatch.setattr(runs, "_run", run)
    monkeypatch.setattr(runs, "machine_cores", lambda: cores)
    monkeypatch.setattr("mla_conformance.engine.devices.machine_cores", lambda: cores)
    monkeypatch.setattr(runs, "visible_gpus", lambda: ("0",))
    monkeypatch.setattr(runs, "whole_memory", lambda device: 40 * 2**30)
    return made


def compared(*backends: str, device: str = "cpu") -> list[str]:
    return list(compare_runs(RunRequest.of(backends, ["lse"], "smoke", "cpu"), torch.device(device)))


def measured(seconds: float, judging: float, **statuses: str) -> Measurement:
    return Measurement({("EAGER", case): Status(status) for case, status in statuses.items()}, seconds, judging)


def test_the_command_judges_what_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "machine_cores", lambda: 1)
    assert main(["bench", "--runs", "EAGER", "--capability", "lse", "--device", "cpu"]) == 0
    _, _, every, last = capsys.readouterr().out.splitlines()
    assert every.startswith(f"EAGER on 1 worker: {LISTED} verdicts in ")
    assert last == "1 worker only: there are no more to compare it with"


def test_ratios_are_of_each_backend_alone_and_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, every = measured(10, 4, a="pass"), measured(6, 2, a="pass"), measured(12, 8, a="pass")
    made = played(monkeypatch, 4, first, second, every, measured(36, 32, a="pass"))
    _, *lines = compared("EAGER", "TORCH_SDPA")
    both = ["EAGER", "TORCH_SDPA"]
    assert made == [(["EAGER"], 4), (["TORCH_SDPA"], 4), (both, 4), (both, 1)]
    assert lines[4:] == [
        "all 2 took 1.50 times (1.20 to 2.00) as long as one alone",  # 12 s beside a mean of 8
        f"1 worker took, beside 4 workers, 3.00 times {LONG}, 4.00 times {JUDGING}",
        "the same 1 verdicts on one as on all",
    ]


def test_a_run_on_a_gpu_is_counted_when_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    cold, warm = measured(100, 90, a="pass"), measured(10, 5, a="pass")
    made = played(monkeypatch, 1, cold, warm)
    _, first, second, last = compared("EAGER", device="cuda")
    assert made == [(["EAGER"], 1)] * 2
    assert first.startswith("EAGER on 1 worker: 1 verdicts in 100.0 s, ") and first.endswith(": a warm-up, not counted")
    assert second.startswith("EAGER on 1 worker: 1 verdicts in 10.0 s, of which 5.0 s ")
    assert last == "1 worker only: there are no more to compare it with"


def test_verdicts_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    every, single = measured(3, 1, a="pass", b="fail"), measured(5, 0, a="pass", b="pass", c="pass")
    played(monkeypatch, 2, every, single)
    *_, ratio, first, second = compared("EAGER")
    assert ratio == f"1 worker took, beside 2 workers, 1.67 times {LONG}, 0.00 times {JUDGING}"
    assert first == "DIFFERENT VERDICTS of EAGER, case b: on one pass, on all fail"
    assert second == "DIFFERENT VERDICTS of EAGER, case c: on one pass, on all none"


@pytest.mark.parametrize(
    ("backends", "said"),
    [(["EAGER", "FLASH_ATTN"], "FLASH_ATTN cannot run here: "), (["NOPE"], "unknown backend 'NOPE'")],
)
def test_a_backend_that_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], backends: list[Any], said: str
) -> None:
    assert main(["bench", "--runs", *backends, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
