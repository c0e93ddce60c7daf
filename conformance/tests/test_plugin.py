"""The pytest plugin from the outside: selection by backend, usage errors, and no weight in anybody else's run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = ["--pyargs", "mla_conformance.suite", "--mla-tier", "smoke", "--mla-device", "cpu", "--mla-capability", "lse"]
LIST = [*SUITE, "--collect-only", "-q"]


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest in a folder of its own, with no settings from outside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # the second takes a second to import
    command = [sys.executable, "-m", "pytest", *without, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def backends_in(listing: str) -> set[str]:
    return set(re.findall(r"backend=([\w\[\]-]+?)\]$", listing, re.MULTILINE))


def test_a_keyword_selects_one_backend_and_runs_it_on_several_workers(tmp_path: Path) -> None:
    status, printed = run(tmp_path, *SUITE, "-k", "backend=TORCH_SDPA", "-n", "2", "-v")
    assert status == 0, printed
    assert set(re.findall(r"backend=(\w+)", printed)) == {"TORCH_SDPA"}
    assert re.search(r"TORCH_SDPA +lse ✔ 3/3", printed) and "3 passed" in printed


@pytest.mark.parametrize(
    ("keyword", "names"),
    [
        ("lse and backend=EAGER or context_chunk and backend='TORCH_SDPA'", {"EAGER", "TORCH_SDPA"}),
        ("context_chunk and not backend=EAGER and (backend=EAGER or backend=TORCH_SDPA)", {"TORCH_SDPA"}),
    ],
)
def test_keywords_combine(tmp_path: Path, keyword: str, names: set[str]) -> None:
    status, listing = run(tmp_path, *LIST, "-k", keyword)
    assert (status, backends_in(listing)) == (0, names), listing


def test_a_keyword_is_exact(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mla_conformance.backends.eager import EagerPrefillBackend\nclass EAGER_2(EagerPrefillBackend): ...\n"
    )
    both = ["--backend", "EAGER", "--backend", "mine.py:EAGER_2"]
    status, listing = run(tmp_path, *LIST, *both, "-k", "backend=EAGER")
    assert (status, backends_in(listing)) == (0, {"EAGER"}), listing


_WATCHES = """
import gc, weakref

trials, alive = [], []


def pytest_runtest_logfinish(nodeid):
    gc.collect()
    alive.append(sum(trial() is not None for trial in trials))


def pytest_runtest_call(item):
    trials.append(weakref.ref(item.funcargs["trial"]))


def pytest_sessionfinish():
    print(f"of {len(trials)} trials at most {max(alive)} alive")
"""


def test_a_trial_and_its_tensors_end_with_its_test(tmp_path: Path) -> None:
    (tmp_path / "watches.py").write_text(_WATCHES)
    status, printed = run(tmp_path, *SUITE, "--backend", "TORCH_SDPA", "-p", "watches", "-s")
    assert status == 0 and "of 3 trials at most 1 alive" in printed, printed


def test_a_marker_selects_a_backend(tmp_path: Path) -> None:
    status, listing = run(tmp_path, *LIST, "-m", "backend(name='EAGER')")
    assert (status, backends_in(listing)) == (0, {"EAGER"}), listing


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "backend=NOPE"],
        ["-k", "backend=EAGER and backend=NOPE", "-n", "2"],
        ["--backend", "NOPE"],
        ["--backend", "NOPE", "-k", "backend=EAGER"],
    ],
)
def test_an_unknown_backend_is_a_usage_error_that_lists_the_known_ones(tmp_path: Path, arguments: list[str]) -> None:
    status, printed = run(tmp_path, *SUITE, *arguments)
    assert status == 4, printed
    assert re.search(r"unknown backend 'NOPE'.*EAGER, TORCH_SDPA.*FLASH_ATTN", printed)
    assert "Traceback" not in printed and "INTERNALERROR" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mla-tier", "huge"], "unknown tier 'huge'"),
        (["--mla-case", "lse:q=x"], "field q: expected a list"),
    ],
)
def test_other_mistakes_are_usage_errors_too(tmp_path: Path, arguments: list[str], said: str) -> None:
    status, printed = run(tmp_path, "--pyargs", "mla_conformance.suite", *arguments)
    assert status == 4 and said in printed, printed


def test_a_named_backend_that_cannot_run_here_is_no_success(tmp_path: Path) -> None:
    status, printed = run(tmp_path, *SUITE, "--backend", "FLASH_ATTN", "-rs")
    assert status == 5 and "FLASH_ATTN unavailable: " in printed, printed


def test_an_unrelated_run_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_modules():\n    assert 'mla_conformance.plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'mla_conformance.running.selection'} & set(sys.modules)\n"
    )
    status, printed = run(tmp_path, "-k", "modules and not backend")
    assert status == 0 and "1 passed" in printed and "= mla-conformance =" not in printed, printed
