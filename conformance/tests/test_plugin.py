"""The pytest plugin: selection by backend, ids, usage errors, and no weight in anybody else's run."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from mla_conformance.backends.references import known_backends
from mla_conformance.engine import beside
from mla_conformance.judging.record import Record, Status
from mla_conformance.vocabulary.capabilities import Tier, find_capability

pytest_plugins = ["pytester"]

CASES = [case.id for case in find_capability("lse").select(Tier.SMOKE)]
SUITE = ["--pyargs", "mla_conformance.suite", "--mla-tier", "smoke", "--mla-device", "cpu", "--mla-capability", "lse"]
WITHOUT = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]
WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend
class WRONG(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, 2 * lse
class EAGER_2(EagerPrefillBackend): ...
"""
Listing = Callable[..., tuple[int, list[str]]]
MISTAKE = pytest.ExitCode.USAGE_ERROR


def pytest_in(folder: Path, *arguments: str, python: Path | str = sys.executable) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def judged(once: Callable[[str, Callable[[Path], None]], Path], python: Path) -> Path:
    """The folder of one run of four backends in two processes: what it printed, its status, its JUnit file."""

    def fill(folder: Path) -> None:
        (folder / "wrong.py").write_text(WRONG)
        names = ["EAGER", "TORCH_SDPA", "FLASH_ATTN", "wrong.py:WRONG"]
        backends = [argument for name in names for argument in ("--backend", name)]
        options = "-n2", "-v", "--junitxml=junit.xml", "-rs"
        status, printed = pytest_in(folder, *SUITE, *backends, *options, python=python)
        (folder / "status").write_text(str(status))
        (folder / "printed").write_text(printed)

    return once("plugin", fill)


def test_every_case_is_judged_on_every_backend_whatever_process_takes_it(judged: Path) -> None:
    printed = (judged / "printed").read_text()
    found = set(re.findall(r"\] (PASSED|FAILED|SKIPPED) test_conformance.py::test_conformance\[(.*)\] ", printed))
    expected = {("PASSED", f"{case}-backend={name}") for case in CASES for name in ("EAGER", "TORCH_SDPA")}
    expected |= {("FAILED", f"{case}-backend=WRONG") for case in CASES}
    assert found == expected | {("SKIPPED", f"{CASES[0]}-backend=FLASH_ATTN")}
    assert (judged / "status").read_text() == "1"
    assert "FLASH_ATTN unavailable: " in printed and "package flash-attn not installed" in printed
    reported, passed = printed.partition("= mla-conformance =")[2], f"✔ lse {len(CASES)}"
    for name, outcome in (("EAGER", passed), ("TORCH_SDPA", passed), ("WRONG", f"✘ lse 0/{len(CASES)}")):
        assert re.search(rf"^{name} . (passed|right:) .*\n +{outcome}$", reported, re.MULTILINE)


def test_a_failure_is_the_sentence_with_its_replay_line_and_no_traceback_in_the_junit_file_too(judged: Path) -> None:
    printed = (judged / "printed").read_text()
    for case in CASES:
        failed = rf"^FAIL WRONG lse · case {re.escape(case)} · .*: LSE is .* \(SPEC 4\.2\)$"
        assert re.search(failed, printed, re.MULTILINE)
        assert f"replay: mla-conformance replay '{case}' --backend {judged}/wrong.py:WRONG" in printed
    assert "Traceback" not in printed and "AssertionError" not in printed
    suite = ElementTree.parse(judged / "junit.xml").getroot()[0]
    counts = [int(suite.get(name, "")) for name in ("tests", "failures", "skipped", "errors")]
    assert counts == [3 * len(CASES) + 1, len(CASES), 1, 0]
    reported = [failure.text or "" for failure in suite.iter("failure")]
    assert [text.partition(" · case ")[0] for text in reported] == ["FAIL WRONG lse"] * len(CASES)
    assert all("replay: mla-conformance replay" in text for text in reported)


@pytest.fixture
def listed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Listing:
    pytester.makepyfile(wrong=WRONG)
    everyone_runs = Mock(reasons=defaultdict[str, tuple[str, ...]](tuple))  # and nothing is judged
    monkeypatch.setattr(beside, "Judging", lambda asked: everyone_runs)

    def listed(*arguments: str) -> tuple[int, list[str]]:
        result = pytester.runpytest_inprocess(*WITHOUT, *arguments, "--collect-only", "-q")
        return int(result.ret), [found[1] for line in result.outlines if (found := re.search(r"\[(.*)\]$", line))]

    return listed


def ids(*names: str) -> list[str]:
    return [f"{case}-backend={name}" for case in CASES for name in names]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (["-k", "backend=TORCH_SDPA"], ["TORCH_SDPA"]),
        (["-k", "lse and backend=EAGER or no_such_word and backend='TORCH_SDPA'"], ["EAGER"]),
        (["-k", "lse and not backend=EAGER and (backend=EAGER or backend=TORCH_SDPA)"], ["TORCH_SDPA"]),
        (["--backend", "EAGER", "--backend", "wrong.py:EAGER_2"], ["EAGER", "EAGER_2"]),
    ],
)
def test_a_selection_is_exact_and_combines(listed: Listing, selection: list[str], names: list[str]) -> None:
    assert listed(*SUITE, *selection) == (0, ids(*names))


def test_a_line_is_shown_while_a_test_runs_and_options_are_told(pytester: pytest.Pytester) -> None:
    told = pytester.runpytest_inprocess(*WITHOUT, "--help", "-k", "x")
    assert told.ret == 0 and "--mla-tier" in told.stdout.str()
    said = "from mla_conformance.api.own_tests import say_meanwhile\n\ndef test_own():\n    say_meanwhile('looking')\n"
    pytester.makepyfile(said)
    assert "looking" in pytester.runpytest_inprocess(*WITHOUT).outlines
    assert "looking" not in pytester.runpytest_inprocess(*WITHOUT, "-q").outlines


def test_a_role_or_a_capability_is_exact_and_options_are_called_as_by_certify(
    listed: Listing, pytester: pytest.Pytester
) -> None:
    kinds = ["--mla-capability=decode", "--mla-capability=sparse_layer", "-k"]
    _, found = listed(*kinds, "EAGER and decode")
    assert found and all(id.startswith("decode:") for id in found)
    _, others = listed(*kinds, "backend=EAGER and not decode")
    assert any("decodes=" in id for id in others) and all(id.startswith("sparse_layer:") for id in others)
    short = ["--tier", "smoke", "--device=cpu", "--capability", "lse"]
    assert listed("-k", "TORCH_SDPA", *short) == listed("--backend=TORCH_SDPA", *short) == (0, ids("TORCH_SDPA"))
    pytester.makeconftest("def pytest_addoption(parser):\n    parser.addoption('--device')")
    own = pytester.makepyfile(
        "import os\n\ndef test_TORCH_SDPA(request):\n    assert request.config.option.device == 'mine'\n"
        "    assert 'MLA_CONFORMANCE_NO_EXPLAIN' in os.environ\n"
    )
    assert pytester.runpytest_inprocess(*WITHOUT, "-k", "TORCH_SDPA", "--device=mine", "--no-explain", own).ret == 0
    assert "MLA_CONFORMANCE_NO_EXPLAIN" not in os.environ


def test_the_ini_file_says_the_tier_of_a_bare_run(listed: Listing, pytester: pytest.Pytester, monkeypatch: Any) -> None:
    monkeypatch.setattr("mla_conformance.backends.references.known_backends", lambda: known_backends()[:2])
    pytester.makeini("[pytest]\nmla_tier = smoke\n")
    suite = ["--pyargs", "mla_conformance.suite"]
    assert listed(*suite, "-m", "backend(name='EAGER') and capability(name='lse')") == (0, ids("EAGER"))
    _, named = listed(*suite, "-k", "backend=EAGER", "-m", "capability(name='lse')")
    assert named == [f"{case.id}-backend=EAGER" for case in find_capability("lse").select(Tier.SMOKE)]
    alone = listed("-k", "backend=EAGER", "-m", "capability(name='lse')")
    assert alone[1] == named, "without a path the suite is meant"
    pytester.makeini("[pytest]\nmla_tier = none\n")
    assert listed(*suite)[1] == ["NOTSET"]
    assert listed(*suite, "-k", "backend=EAGER", "-m", "capability(name='lse')")[1] == named


@pytest.mark.parametrize(
    ("arguments", "ended", "said"),
    [
        (["-k", "backend=NOPE"], MISTAKE, "unknown backend 'NOPE'; expected one of EAGER, TORCH_SDPA"),
        (["--backend", "NOPE", "-k", "backend=EAGER"], MISTAKE, "unknown backend 'NOPE'; expected one of EAGER, TORCH"),
        (["--mla-case", "lse:q=x"], MISTAKE, "field q: expected a list"),
        ([*SUITE[2:], "--backend", "FLASH_ATTN"], pytest.ExitCode.NO_TESTS_COLLECTED, "1 skipped"),
    ],
)
def test_what_cannot_be_judged_is_no_success(pytester: Any, arguments: list[str], ended: int, said: str) -> None:
    result = pytester.runpytest_inprocess(*WITHOUT, "--pyargs", "mla_conformance.suite", *arguments)
    printed = "\n".join([*result.outlines, *result.errlines])
    assert result.ret == ended and said in printed
    assert "Traceback" not in printed and "INTERNALERROR" not in printed


def test_an_unrelated_run_imports_no_torch(tmp_path: Path) -> None:
    """Of two folders with settings of their own: pytest asks which plug-ins are not those of the other one."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "conftest.py").touch()
    (tmp_path / "b" / "test_other.py").write_text(
        "import sys\n\ndef test_modules():\n    assert 'mla_conformance.plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'mla_conformance.engine.request'} & set(sys.modules)\n"
    )
    (tmp_path / "a" / "test_one.py").write_text("def test_modules(): ...\n")
    status, printed = pytest_in(tmp_path, "-k", "modules and not backend", "a", "b")
    assert status == 0 and "2 passed" in printed and "= mla-conformance =" not in printed, printed


ENDING = """
import atexit, os, threading, time, unittest
import pytest
def at_once(): os._exit(0)
def at_exit(): atexit.register(os._exit, 0)
def skips(): raise unittest.SkipTest("later\\x1b[2J")
def exits(): pytest.exit("done", returncode=0)
def from_a_thread(): threading.Thread(target=lambda: os._exit(0)).start(); time.sleep(600)
"""
ENDS = f"""{ENDING}
from mla_conformance.backends.eager import EagerPrefillBackend
class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, *_, **__): return q.new_zeros(*q.shape[:2], v.shape[-1])
class AtOnce(Wrong):
    def run_prefill_new_tokens(self, *_, **__): at_once()
class Skips(Wrong):
    def run_prefill_new_tokens(self, *_, **__): skips()
"""
CASE = "new_tokens:q=[4];lse=0"
OWN = f"""
import pytest
import mla_conformance as mla
from ending import {{way}}
@pytest.mark.parametrize("case", [mla.case("{CASE}")], ids=str)
def test_mine(case):
    {{way}}()
    assert case.id == "right"  # judging it would have torch imported
"""


def test_where_assertions_are_left_out_a_failure_is_one() -> None:
    space: dict[str, Any] = {}
    source = (files("mla_conformance.suite") / "test_conformance.py").read_text("utf-8")
    exec(compile(source, "suite", "exec", optimize=2), space)
    space["test_conformance"](lambda: Record("A", "A", "lse", CASE, Status.PASS))
    with pytest.raises(AssertionError, match="wrong"):
        space["test_conformance"](lambda: Record("A", "A", "lse", CASE, Status.FAIL, message="wrong"))


def test_who_ends_the_process_that_judges_a_kernel_has_no_success(tmp_path: Path, python: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDS)
    backends = [f"--backend=ending.py:{name}" for name in ("AtOnce", "Skips", "Wrong")]
    suite = [*backends, "--mla-device=cpu", f"--mla-case={CASE}"]
    status, printed = pytest_in(tmp_path, "-q", *suite, python=python)
    assert status == 1 and "\n3 failed" in printed and "\x1b" not in printed, printed


def test_who_ends_the_process_of_tests_as_a_success_has_none(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    for way in ("skips", "exits", "at_exit"):
        (tmp_path / f"test_{way}.py").write_text(OWN.format(way=way))
    status, printed = pytest_in(tmp_path, "-q")
    assert status == 1 and "\n3 failed" in printed, printed


@pytest.mark.parametrize(("way", "arguments"), [("at_once", []), ("from_a_thread", ["real/check_own.py"])])
def test_who_ends_the_process_is_seen_wherever_tests_stand(tmp_path: Path, way: str, arguments: list[str]) -> None:
    for folder in ("real", "checks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "checks" / "linked").symlink_to("../real")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = ch*\npython_files = check_*.py\n")
    own = {"shared": OWN.format(way=way), "check_own": "from shared import test_mine\n"}
    for name, text in {"ending": ENDING, **own}.items():
        (tmp_path / "real" / f"{name}.py").write_text(text)
    status, printed = pytest_in(tmp_path, "-q", *arguments)
    assert status == 1 and "ended with exit status 0 before pytest had a result" in printed, printed


def test_who_kills_pytest_ends_the_tests_and_a_run_ends_where_ends_of_children_are_ignored(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "test_own.py").write_text(
        "# mla_conformance\nimport time\n\ndef test_lasts():\n    with open('told', 'w') as told:\n"
        "        told.write('begun')\n        told.flush()\n        time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py"]
    with subprocess.Popen(command, cwd=tmp_path) as run, told.open() as heard:
        assert heard.read(5) == "begun"
        run.kill()
        assert heard.read() == ""  # the other end is closed
    (tmp_path / "test_own.py").write_text("# mla_conformance\n\ndef test_nothing(): ...\n")
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"  # a venv is found by the first of them
    )
    line = [sys.executable, "-c", ignoring, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    assert subprocess.run(line, cwd=tmp_path, check=False, timeout=120).returncode == 0


def test_what_keeps_a_failure_from_running_again_alone_leaves_the_summary(tmp_path: Path, python: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.format(way="dict").replace("from ending import dict", ""))
    (tmp_path / "conftest.py").write_text(
        "import subprocess\n\ndef interrupted(*args, **kwargs):\n    raise KeyboardInterrupt\n\n"
        "def pytest_sessionfinish():\n    subprocess.run = interrupted\n"
    )
    status, printed = pytest_in(tmp_path, "-q", "test_own.py", python=python)
    assert status == 1 and "test_own.py::test_mine: 1 of 1 case fail" in printed, printed
