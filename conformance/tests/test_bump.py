"""Two versions of a library: installed beside each other, judged by the same list, and told apart honestly."""

import os
import select
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from mla_conformance.bump.outcome import Bump, JudgedVersion, bump_lines, bump_markdown
from mla_conformance.bump.version import Environment, Found, Pin, find, two_versions
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.speed.times import Interval, Speed, Timed
from mla_conformance.tests.reports import run_of
from mla_conformance.vocabulary.capabilities import write_case

PLUGIN = """
from dataclasses import replace
from mla_conformance.backends.eager import EagerPrefillBackend
class Doubling(EagerPrefillBackend):
    declaration = replace(EagerPrefillBackend.declaration, distributions=("torch", "fake-attention"))
    def _finish(self, state):
        import fake_attention
        output, lse = super()._finish(state)
        return fake_attention.halved(2 * output), lse
"""
RIGHT, WRONG = "def halved(x): return x / 2\n", "def halved(x): raise RuntimeError('no kernel')\n"
TELLS = "if __name__ == '__main__': import shutil; print(shutil.which('python'))"
"""Which Python a library would start."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version, source in (("1.0", RIGHT), ("2.0", WRONG)):
        with ZipFile(folder / f"fake_attention-{version}-py3-none-any.whl", "w") as wheel:
            about = f"fake_attention-{version}.dist-info"
            wheel.writestr("fake_attention.py", source + TELLS)
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: fake-attention\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def bumped(wheels: Path, once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def fill(folder: Path) -> None:
        (folder / "plugin.py").write_text(PLUGIN)
        write_case(folder / "cases" / "one.json", Case.parse("new_tokens:q=[3]"))
        options = [f"--backend={folder / 'plugin.py'}:Doubling", "--device=cpu", f"--cases={folder / 'cases'}"]
        options += [f"--find-links={wheels}", f"--markdown={folder / 'pull.md'}", f"--out={folder / 'out'}"]
        assert main(["bump", "fake-attention==1.0", "fake-attention==2.0", *options]) == 1

    return once("bump", fill)


def test_a_wrong_version_is_not_innocent(bumped: Path) -> None:
    reported = (bumped / "pull.md").read_text(encoding="utf-8")
    assert "REGRESSED · 1 newly failing · pass with both: 0 cases" in reported
    assert "| fake-attention | 1.0 | 2.0 |" in reported
    assert "| Doubling | 1/1 passed | 0/1 passed, 1 failed |" in reported
    assert "| Doubling | new\\_tokens:q=\\[3\\] | fail: new tokens: the call raised RuntimeError: no kernel" in reported
    # Each run stays with the version that it loaded, and with the torch of the caller.
    before, after = (load_report(bumped / "out" / side) for side in ("before", "after"))
    versions = [run.backends[0].facts.versions for run in (before, after)]
    assert [each["fake-attention"] for each in versions] == ["1.0", "2.0"]
    assert before.environment == after.environment and versions[0]["torch"] == before.environment["torch"]


def test_an_environment_sees_its_own_library_first(bumped: Path, tmp_path: Path, monkeypatch: Any) -> None:
    environment = Environment(bumped / "out" / "before" / "environment", Pin.parse("fake-attention==1.0"))
    assert environment.added == ("fake-attention",)
    here = find(["torch", "fake-attention"])
    there = environment.find(["torch", "fake-attention"])
    assert there["torch"] == here["torch"] != Found()
    assert (here["fake-attention"], there["fake-attention"]) == (Found(), Found("1.0"))
    assert environment.run("fake_attention", otherwise="failed").stdout.strip() == str(environment.python)
    with pytest.raises(InputError, match=r"expected fake-attention 2\.0 in .*, got 1\.0"):
        replace(environment, pin=Pin.parse("fake-attention==2.0")).require_installed()
    (tmp_path / "fake_attention.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InputError, match=rf"expected import fake_attention to take .* got {tmp_path}/fake_attention"):
        environment.require_installed()


def test_what_pip_says_is_told(wheels: Path, tmp_path: Path, told: Any) -> None:
    bump = ["bump", "fake-attention==3.0", "fake-attention==2.0", "--backend=EAGER", f"--find-links={wheels}"]
    said = told(2, *bump, f"--out={tmp_path / 'out'}")
    assert "fake-attention 3.0 is not installed, pip failed with status 1" in said
    assert "No matching distribution found for fake-attention==3.0" in said
    assert "expected a new or an empty folder" in told(2, *bump, f"--out={tmp_path}")
    said = told(2, *bump, "--backend=FLASHINFER", "--device=cpu", f"--out={tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
    assert "FLASHINFER: needs compute capability 8.0 or newer: this device has none" in said


PIP = """
import os, signal, time
told, number = open(os.environ["TOLD"], "w"), int(os.environ["NUMBER"])
told.write("begun")
told.flush()
signal.signal(number, signal.SIG_IGN)
if os.fork():
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getppid(), number)
else:
    os.closerange(1, 3)
time.sleep(100)
"""
"""It has a child that does not heed signals; as long as one of the two runs, somebody may write into the fifo."""


def test_a_signal_reaches_what_runs_and_all_that_it_started(tmp_path: Path, monkeypatch: Any, ours: Any) -> None:
    (tmp_path / "pip.py").write_text(PIP)
    os.mkfifo(reported := tmp_path / "told")
    for name, value in {"PYTHONPATH": tmp_path, "TOLD": reported, "NUMBER": int(signal.SIGHUP)}.items():
        monkeypatch.setenv(name, str(value))
    writers = os.open(reported, os.O_RDONLY | os.O_NONBLOCK)
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # or it is ignored, where this process is in the background
    try:
        found = ours("bump", "fake-attention==1.0", "fake-attention==2.0", "--backend=EAGER", f"--out={tmp_path}/out")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found[::2] == (128 + signal.SIGHUP, "mla-conformance: ended by SIGHUP\n")
    assert os.read(writers, 100) == b"begun"
    assert select.select([writers], [], [], 60)[0] and os.read(writers, 100) == b""
    os.close(writers)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("x==1", "y==2", "expected two versions of one library, got x and y"),
        ("x==1", "x==1.0", "expected two different versions of x, got 1 and 1.0"),
        *((before, "x @ file:///x.whl", "expected NAME==VERSION") for before in ("x>=1", "x==1.*", "x==1")),
    ],
)
def test_what_is_no_bump_and_that_a_name_has_several_spellings(before: str, after: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        two_versions(before, after)
    old, new = two_versions("Flash_Attn[all]==2.8", "flash-attn==2.9.post1")
    assert old.name == new.name == "flash-attn"
    assert old.admits("2.8.0+cu130") and not old.admits("2.8.1") and new.admits("2.9.post1") and not new.admits("")


A, B = "lse:q=[1]", "lse:q=[2]"
PASS, FAIL, UNSUPPORTED = Status.PASS, Status.FAIL, Status.UNSUPPORTED
OLD, NEW = Pin.parse("x==1"), Pin.parse("x==2")


def judged(pin: Pin, statuses: dict[str, Status], used: float = 0.2, reasons: tuple[str, ...] = ()) -> JudgedVersion:
    records = [Record("K", "K", "lse", case, status, used={"row": used}) for case, status in statuses.items()]
    facts = BackendFacts("K", "K", reasons, versions={} if reasons else {"X": pin.version})
    return JudgedVersion(pin, replace(run_of(records, (A, B), [facts]), source="report"), {"x": pin.version})


GOOD, HALF = {A: PASS, B: PASS}, {A: FAIL, B: PASS}
GONE = ("package x not installed",)


@pytest.mark.parametrize(
    ("before", "after", "status", "said"),
    [
        (judged(OLD, GOOD), judged(NEW, GOOD), 0, "no regression · pass with both: 2 cases"),
        (judged(OLD, HALF), judged(NEW, HALF), 0, "pass with both: 1 case, fail with both: 1"),
        (judged(OLD, HALF), judged(NEW, GOOD), 0, "no regression · pass with both: 1 case · none newly fails"),
        (judged(OLD, GOOD), judged(NEW, {A: PASS, B: FAIL}), 1, "REGRESSED · 1 newly failing"),
        (judged(OLD, GOOD), judged(NEW, GOOD, used=0.31), 1, "2 error grew"),
        (judged(OLD, GOOD), judged(NEW, {A: PASS}), 1, "1 no longer judged"),
        (judged(OLD, GOOD), judged(NEW, {}, reasons=GONE), 1, "1 no longer available"),
        (judged(OLD, {}, reasons=GONE), judged(NEW, GOOD), 3, "NOT JUDGED · pass with both: 0 cases · K could"),
        (judged(OLD, {}, reasons=GONE), judged(NEW, {}, reasons=GONE), 3, "NOT JUDGED"),
        (judged(OLD, {A: PASS}), judged(NEW, GOOD), 3, "NOT JUDGED · 1 newly passing · pass with both: 1 case"),
        (judged(OLD, {A: FAIL, B: FAIL}), judged(NEW, {A: FAIL, B: FAIL}), 3, "NOT JUDGED"),
    ],
)
def test_verdicts(before: JudgedVersion, after: JudgedVersion, status: int, said: str) -> None:
    found = Bump(before, after)
    before.require_loaded()
    after.require_loaded()
    assert found.exit_status == status
    assert said in list(bump_lines(found))[-1]
    assert ("no regression" in bump_markdown(found)) == (not status)


def test_why_a_backend_was_not_compared_is_told_and_another_version_is_an_error() -> None:
    lines = list(bump_lines(Bump(judged(OLD, {}, reasons=GONE), judged(NEW, {A: PASS}))))
    assert lines[0] == "x 1 → 2" and lines[1] == "K unavailable → 1/2 passed, 1 NOT RUN"
    assert "? K: unavailable with 1: package x not installed; with 2 1 NOT RUN" in lines
    assert f"· newly passing: K {A} · was fail" in bump_lines(Bump(judged(OLD, HALF), judged(NEW, GOOD)))
    (backend,) = (right := judged(NEW, GOOD)).run.backends
    for versions in ({}, {"x": "1"}, {"x": "not installed as a distribution"}):
        stray = replace(backend, facts=replace(backend.facts, versions=versions))
        with pytest.raises(InputError, match="report: expected K to stand on x 2, got "):
            replace(right, run=replace(right.run, backends=(stray,))).require_loaded()


def test_times_stand_side_by_side_and_decide_nothing() -> None:
    sides = []
    for version, median in ((OLD, 100.0), (NEW, 250.0)):
        found = judged(version, GOOD)
        speed = Speed((Timed("decode", "decode 1 × 1k", called=Interval(median, median - 1, median + 1)),))
        backends = (replace(found.run.backends[0], speed=speed),)
        sides.append(replace(found, run=replace(found.run, backends=backends)))
    lines = list(bump_lines(bump := Bump(*sides)))
    assert "K decode 1 × 1k 100 µs ± 1 → 250 µs ± 1" in lines and bump.exit_status == 0
    assert "| K | decode 1 × 1k | 100 µs ± 1 | 250 µs ± 1 |" in bump_markdown(bump)
