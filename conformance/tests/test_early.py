"""Processes that a run starts: whose backend's import misbehaves, and the one that compares a failure and may end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
import torch

from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Case
from mla_conformance.defects.bounds import reads, writes
from mla_conformance.diagnosis.explain import Failure, candidates
from mla_conformance.engine import explainer
from mla_conformance.engine.explainer import Explainer
from mla_conformance.engine.messages import tell
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import passing_run
from mla_conformance.engine.tasks import call_of
from mla_conformance.judging.record import Status
from mla_conformance.report.json_report import load_report
from mla_conformance.report.outcome import backend_lines
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judged_trial
from mla_conformance.vocabulary.capabilities import write_case


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes have no such files")
def test_it_ends_with_a_command_that_has_no_use_for_it() -> None:
    mark = f"MARK={uuid4()}"
    command = [sys.executable, "-P", "-m", "mla_conformance", "certify", "--nonsense"]
    environment = {**os.environ, "MARK": mark.partition("=")[2]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--nonsense" in done.stderr
    end = time.monotonic() + 20
    while any(mark.encode() in _environment(process) for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in (3, 4, 5, 6)]
CASES += ["lse:call=context_chunk;dims=small;heads=2;q=[3];kv=[5]"]
DIED = "its process ended while it was imported and described: "
UNAVAILABLE = {
    "Segfaults": ("import ctypes; ctypes.string_at(0)", DIED + "Segmentation fault"),
    "Exits": ("import sys; sys.exit(0)", "does not import: SystemExit: 0"),
    "ExitsAtOnce": ("import os; os._exit(0)", DIED + "exit status 0"),
    "Hangs": ("import time; time.sleep(1000)", DIED + "no answer within 2 s"),
    "Raises": ("import no_such_library", "does not import: ModuleNotFoundError: No module named 'no_such_library'"),
}
AVAILABLE = {
    "Prints": "import os; print('{'); os.write(1, b'['); os.write(2, b'[')",
    "Forks": "import os; os.fork()",
    "Replaces": "import builtins, torch; exp = torch.exp; torch.Tensor.exp = lambda tensor: 2 * exp(tensor); "
    "builtins.len = lambda _: 0",
}
HANGS_WHEN_MADE = "    def __init__(self, *arguments, **options): __import__('time').sleep(1000)"


def reference(folder: Path, name: str, statement: str, body: str = "    ...") -> str:
    source = folder / f"{name.lower()}.py"
    eager = "from mla_conformance.backends.eager import EagerPrefillBackend"
    source.write_text(f"{eager}\n{statement}\nclass {name}(EagerPrefillBackend):\n{body}\n")
    return f"--backend={source}:{name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command: Path) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    folder = tmp_path_factory.mktemp("imports")
    statements = {name: statement for name, (statement, _) in UNAVAILABLE.items()} | AVAILABLE
    backends = [reference(folder, name, statement) for name, statement in statements.items()]
    backends += [reference(folder, "HangsWhenMade", "", HANGS_WHEN_MADE), "--backend=EAGER"]
    for number, case in enumerate(CASES):
        write_case(folder / "cases" / f"{number}.json", Case.parse(case))
    options = [f"--cases={folder / 'cases'}", "--device=cpu", "--timeout=2s", "--give-up-after=1", "--workers=2"]
    call = [str(command), "certify", *backends, *options, "--json", f"--out={folder / 'out'}"]
    return folder / "out", subprocess.run(call, capture_output=True, text=True, check=False)


def test_a_backend_that_misbehaves_costs_its_own_verdicts_only(run: tuple[Path, Any]) -> None:
    """What an import replaced is put back, for all of them."""
    backends = {backend.name: backend for backend in load_report(run[0]).backends}
    for name, (_, said) in UNAVAILABLE.items():
        (reason,) = backends[name].reasons
        assert said in reason, name
    for name in ("EAGER", *AVAILABLE):
        assert [record.status for record in backends[name].records] == [Status.PASS] * len(CASES), name
    folder, done = run  # standard output is exactly one document, whatever backends print
    assert json.loads(done.stdout) == json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert done.returncode == 1 and done.stderr == ""


def test_after_equal_timeouts_the_rest_is_not_run_with_the_reason(run: tuple[Path, Any]) -> None:
    (hangs,) = (backend for backend in load_report(run[0]).backends if backend.name == "HangsWhenMade")
    timeouts = [record.status for record in hangs.records]
    calls = {call_of(record.case) for record in hangs.records}
    assert set(timeouts) == {Status.TIMEOUT} and len(timeouts) <= 2 * len(calls)  # two workers may be at each
    assert hangs.counts.not_run == len(CASES) - len(timeouts)
    said = "after 1 equal failures of its process: no verdict within the time"
    lines = "\n".join(backend_lines(hangs, 1000))
    assert f"{hangs.counts.not_run} NOT RUN: gave up on " in lines
    assert all(f"gave up on {call} {said}" in lines for call in calls)


ENDS_WHEN_FITTED = """
import os
from mla_conformance.backends.eager import EagerPrefillBackend
class EndsWhenFitted(EagerPrefillBackend):
    asked = 0
    @classmethod
    def validate_configuration(cls, *operands, **named):
        EndsWhenFitted.asked += 1
        if cls.asked > 100:
            os._exit(3)
        return super().validate_configuration(*operands, **named)
"""


def test_a_process_that_ends_while_cases_are_fitted_leaves_no_shorter_list(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS_WHEN_FITTED)
    request = RunRequest.of([f"{tmp_path / 'ends.py'}:EndsWhenFitted"], ["combinations"], device="cpu")
    with passing_run(request) as run, run:
        run.prepare()
        (facts,) = run.facts
    assert facts.reasons == ("its process ended while cases were fitted to it: exit status 3",) and not facts.fitted


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
from mla_conformance.backends.eager import EagerPrefillBackend as E
class Wrong(E):
    def _finish(self, state): return E._finish(self, state)[0], E._finish(self, state)[1] + 0.25
"""
ENDED = "explanation ended by signal 11 (Segmentation fault)"


def test_the_end_of_an_explanation_is_told_and_ends_nothing_else(tmp_path: Path) -> None:
    for name, text in {"sitecustomize.py": ENDS, "wrong.py": KERNEL}.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    line = "certify --capability lse --tier smoke --out out -n1 --backend wrong.py:Wrong --device cpu"
    command = [sys.executable, "-m", "mla_conformance", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and ENDED in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_in_a_test_run_each_thread_is_told_of_the_end_of_the_process_beside(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "wrong.py").write_text(KERNEL)
    subject = Subject.of(f"{tmp_path / 'wrong.py'}:Wrong", torch.device("cpu"))
    trial, record = judged_trial(subject, Case.parse("lse:dims=small;heads=2;q=[5,9]"), Context())
    failure, beside = Failure.of(trial, record), Explainer()

    def tell_and_kill(connection: socket.socket, asked: object) -> None:
        tell(connection, asked)
        beside._process.send_signal(signal.SIGSEGV)

    monkeypatch.setattr(explainer, "tell", tell_and_kill)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(beside.explain, [("test", "Wrong")] * 2, [failure] * 2)] == [ENDED] * 2


@pytest.mark.parametrize("touch", [reads, writes])
def test_no_defect_touches_memory_of_others_nor_is_compared(touch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's address may be mapped here all the same, and then is somebody else's: no page is even asked about."""
    mincore = Mock(return_value=1)  # not mapped
    monkeypatch.setattr("mla_conformance.defects.bounds._libc.mincore", mincore)
    touch(torch.empty(8, device="meta"), -16, 16)  # type: ignore[operator]
    assert not mincore.called
    touch(torch.empty(8), -16, 16)  # type: ignore[operator]
    assert mincore.called
    compared = {each.kernel.__module__ for role in ROLES.values() for each in candidates(role)}
    assert compared and all("bounds" not in module for module in compared)
