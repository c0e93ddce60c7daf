"""Comparing a failure with known ones may end the process that does it: then the failure says so, wherever told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_conformance.backends.roles import ROLES
from mla_conformance.defects.bounds import reads, writes
from mla_conformance.diagnosis.candidates import candidates

CASE = "lse:dims=small;heads=2;q=[5,9]"
ENDS = """
import importlib.util, os, signal, sys

class EndsWhereCandidatesAreAsked:
    def find_spec(self, name, path=None, target=None):
        if name != "mla_conformance.diagnosis.explain":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        executed = spec.loader.exec_module

        def exec_module(module):
            executed(module)
            module.candidates = lambda role: os.kill(os.getpid(), signal.SIGSEGV)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, EndsWhereCandidatesAreAsked())
"""
KERNEL = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Wrong(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse + 0.25
"""
TESTS = f"""
from concurrent.futures import ThreadPoolExecutor
import mla_conformance as mla

def conforms():
    case = mla.case("{CASE}")
    q, v = (case.inputs("cpu")[name] for name in ("q", "v"))
    mla.assert_conforms(case, q.new_ones(*q.shape[:2], v.shape[-1]), q[..., 0].float().mT)

def test_threads():
    with ThreadPoolExecutor(2) as pool:
        failures = [each.exception() for each in [pool.submit(conforms) for _ in range(2)]]
    print(*failures)
    assert all(each is None for each in failures)
"""
ENDED = "explanation ended by signal 11 (Segmentation fault)"


def printed(folder: Path, *command: str) -> str:
    """What a command prints where the process ends that compares a failure."""
    for name, text in {"sitecustomize.py": ENDS, "wrong.py": KERNEL, "test_mine.py": TESTS}.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_the_end_of_an_explanation_is_told_and_ends_nothing_else(tmp_path: Path) -> None:
    command = "mla_conformance certify --capability lse --tier smoke --out out -n 1 --backend wrong.py:Wrong"
    assert ENDED in printed(tmp_path, *command.split(), "--device=cpu", "--timeout=60")


def test_in_a_test_run_threads_take_turns(tmp_path: Path) -> None:
    said = printed(tmp_path, "pytest", "-s", "-p", "no:cacheprovider", "test_mine.py")
    assert said.count(ENDED) == 2


@pytest.mark.parametrize("touch", [reads, writes])
def test_no_defect_touches_memory_that_is_not_this_processs(touch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's address may be mapped here all the same, and then is somebody else's: no page is even asked about."""
    asked: list[object] = []

    def not_mapped(*page: object) -> int:
        asked.append(page)
        return 1

    monkeypatch.setattr("mla_conformance.defects.bounds._libc.mincore", not_mapped)
    touch(torch.empty(8, device="meta"), -16, 16)  # type: ignore[operator]
    assert not asked
    touch(torch.empty(8), -16, 16)  # type: ignore[operator]
    assert asked


def test_no_failure_is_compared_with_what_touches_memory() -> None:
    compared = {each.kernel.__module__ for role in ROLES.values() for each in candidates(role)}
    assert compared and all("bounds" not in module for module in compared)
