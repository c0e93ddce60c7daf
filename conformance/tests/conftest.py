"""Threads of the tests that run side by side, and reports that no run has to be made for."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from mla_conformance.record import Record
from mla_conformance.report.json_report import report_json, write_json
from mla_conformance.report.summary import BackendSummary, RunSummary, by_backend, summarise
from mla_conformance.version import SUITE_VERSION

# Kernels' threads that wait for cores which other tests' threads hold make everything many times slower. The variable
# is for the processes that tests start.
_THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))
torch.set_num_threads(_THREADS)


@pytest.fixture
def write_report(tmp_path: Path) -> Callable[..., Path]:
    """Writes the report of a run whose records are given, as ``certify`` would; returns its path."""

    def write(name: str, records: Sequence[Record], listed: dict[str, int] | None = None, **environment: str) -> Path:
        backends = tuple(
            BackendSummary(backend, (), {"torch": "2.13.0"}, False, (), {}, summarise(group, listed or {}))
            for backend, group in by_backend(records).items()
        )
        path = tmp_path / name
        told = {"suite": SUITE_VERSION, "tier": "full", "device": "cpu", "torch": "2.13.0", **environment}
        write_json(path, report_json(RunSummary(told, backends)))
        return path

    return write
