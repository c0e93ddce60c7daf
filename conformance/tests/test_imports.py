"""A backend whose import, or whose constructor, misbehaves costs its own verdicts only, and never the run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.engine.tasks import call_of
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.report.outcome import backend_lines
from mla_conformance.vocabulary.capabilities import Tier, find_capability

LISTED = len(find_capability("lse").select(Tier.SMOKE))
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
    "Replaces": "import torch; exp = torch.exp; torch.Tensor.exp = lambda tensor: 2 * exp(tensor)",
}
HANGS_WHEN_MADE = """
import time
from mla_conformance.backends.eager import EagerPrefillBackend

class HangsWhenMade(EagerPrefillBackend):
    def __init__(self, *arguments, **options):
        time.sleep(1000)
"""


def reference(folder: Path, name: str, statement: str) -> str:
    """A backend that does as EAGER does once it is imported."""
    source = folder / f"{name.lower()}.py"
    eager = "from mla_conformance.backends.eager import EagerPrefillBackend"
    source.write_text(f"{eager}\n{statement}\nclass {name}(EagerPrefillBackend): ...\n")
    return f"--backend={source}:{name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command: Path) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of one run over all of them and EAGER, and what it printed."""
    folder = tmp_path_factory.mktemp("imports")
    statements = {name: statement for name, (statement, _) in UNAVAILABLE.items()} | AVAILABLE
    backends = [reference(folder, name, statement) for name, statement in statements.items()]
    (folder / "made.py").write_text(HANGS_WHEN_MADE)
    backends += [f"--backend={folder / 'made.py'}:HangsWhenMade", "--backend=EAGER"]
    options = ["--capability=lse", "--tier=smoke", "--device=cpu", "--timeout=2s", "--give-up-after=1", "--workers=2"]
    call = [str(command), "certify", *backends, *options, "--json", f"--out={folder / 'out'}"]
    return folder / "out", subprocess.run(call, capture_output=True, text=True, check=False)


def test_a_backend_that_misbehaves_costs_its_own_verdicts_only(run: tuple[Path, Any]) -> None:
    """What an import replaced is put back, for all of them."""
    backends = {backend.name: backend for backend in load_report(run[0]).backends}
    for name, (_, said) in UNAVAILABLE.items():
        (reason,) = backends[name].reasons
        assert said in reason, name
    for name in ("EAGER", *AVAILABLE):
        assert [record.status for record in backends[name].records] == [Status.PASS] * LISTED, name


def test_stdout_is_exactly_one_document_whatever_backends_print(run: tuple[Path, Any]) -> None:
    folder, done = run
    assert json.loads(done.stdout) == json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert done.returncode == 1 and done.stderr == ""


def test_after_equal_timeouts_the_rest_is_not_run_with_the_reason(run: tuple[Path, Any]) -> None:
    (hangs,) = (backend for backend in load_report(run[0]).backends if backend.name == "HangsWhenMade")
    timeouts = [record.status for record in hangs.records]
    calls = {call_of(record.case) for record in hangs.records}
    assert set(timeouts) == {Status.TIMEOUT} and len(timeouts) <= 2 * len(calls)  # two workers may be at each
    assert hangs.counts.not_run == LISTED - len(timeouts)
    said = "after 1 equal failures of its process: no verdict within the time"
    lines = "\n".join(backend_lines(hangs, 1000))
    assert f"{hangs.counts.not_run} NOT RUN: gave up on " in lines
    assert all(f"gave up on {call} {said}" in lines for call in calls)
