"""A process that waits for its first case uses its GPU meanwhile."""

import pytest
import torch

from mla_conformance.engine import warming, worker
from mla_conformance.judging.verdict import Status, Verdict
from mla_conformance.trials.context import Context


def test_what_is_done_for_a_case_is_done_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Verdict] = []
    judge = warming.judge
    monkeypatch.setattr(warming, "judge", lambda *given: verdicts.append(judge(*given)))
    warming.warm_up(Context(), torch.device("cpu"))
    assert [verdict.status for verdict in verdicts] == [Status.PASS]


def test_a_gpu_that_does_not_work_is_left_to_the_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(warming, "judge", broken)
    warming.warm_up(Context(), torch.device("cpu"))


def test_a_cpu_is_not_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "warm_up", lambda *_: pytest.fail("used"))
    worker.Worker(torch.device("cpu"), None, lambda event: None).warm_up()
