"""What decides is loaded before a kernel is: what the kernel writes on disk is read by nobody, or ends the run."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.driving import loaded
from mla_conformance.driving.loaded import deciding_files
from mla_conformance.files.places import harness_files, load_all_again, refuse_written_since
from mla_conformance.tests.reports import unexplained

WRONG = """
import os, pathlib, re, sys
from mla_conformance.backends.eager import EagerPrefillBackend
class Wrong(EagerPrefillBackend):
    calls = 0
    def run_prefill_new_tokens(self, *arguments, **options):
        found = super().run_prefill_new_tokens(*arguments, **options)
        type(self).calls += 1
        self.attack(self.calls)
        return (found[0] * 1.5, found[1]) if isinstance(found, tuple) else found * 1.5
"""
ATTACKS = (
    WRONG
    + """
    def attack(self, calls):
        here = pathlib.Path.cwd()
        for name in sys.stdlib_module_names | {NAMES}:
            text = f"open({str(here)!r} + '/read-{name}', 'a').close()\\nraise ImportError"
            (here / f"{name}.py").write_text(text)
        import mla_conformance
        file = pathlib.Path(mla_conformance.__file__).parent / "judging" / "tolerance.toml"
        if not (here / "kept").exists():
            (here / "kept").write_bytes(file.read_bytes())
            file.write_text(re.sub("value = .*", "value = 1e9", file.read_text()))
        else:
            file.write_bytes((here / "kept").read_bytes())
"""
)
NAMES = {"jinja2", "markupsafe", "rich", "msgspec", "hypothesis", "packaging", "numpy", "mla_conformance"}


def test_nobody_reads_what_a_kernel_writes_into_the_current_folder_or_the_installation(tmp_path: Path) -> None:
    """Started as a module, with a folder of the kernel's as the current one; the installation is as it was at last."""
    for name, path in harness_files().items():  # which goes before the installed one
        (site := tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, site)
    (tmp_path / "kernel.py").write_text(ATTACKS.replace("NAMES", ", ".join(map(repr, sorted(NAMES)))))
    command = [sys.executable, "-m", "mla_conformance", "certify", "--backend", "kernel.py:Wrong"]
    command += ["--capability", "softmax_scale", "--tier", "smoke", "--device", "cpu", "-n1", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "wrong: Wrong" in done.stdout, done.stderr
    assert (tmp_path / "jinja2.py").exists() and (tmp_path / "kept").exists() and not list(tmp_path.glob("read-*"))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["backends"]["Wrong"]["status"] == "fail"


FORGES = """
    def attack(self, calls):
        pathlib.Path(__file__).with_name("decides.toml").write_text("forged")
"""


def test_an_installation_that_is_another_at_the_end_has_no_report(here: Path, monkeypatch: Any, ours: Any) -> None:
    (here / "kernel.py").write_text(WRONG + FORGES)
    decides = here / "decides.toml"
    decides.touch()
    monkeypatch.setattr(loaded, "harness_files", lambda: {"decides.toml": decides})
    asked = "--backend=kernel.py:Wrong --capability=new_tokens --tier=smoke --device=cpu -n1 --out=out"
    with unexplained():
        status, _, said = ours("certify", *asked.split())
    assert status == 3 and f"1 file of this installation changed while the run judged, such as {decides}" in said
    assert not (here / "out" / "report.json").exists()


def test_what_judges_is_in_memory_before_a_backend_is(tmp_path: Path) -> None:
    """The judge imports nothing once a backend is there, whatever it has to judge and explain."""
    code = f"""
import socket, sys, time, torch
from mla_conformance.cases.sharding import Extent
from mla_conformance.engine.messages import Describe, Explore, Judge, Setup
from mla_conformance.engine.worker import Worker, load_all, start_kernel_process
from mla_conformance.files.places import refuse_written_since
load_all(setup := Setup("cpu", draws=True))
refuse_written_since(time.time())
before, (connection, _) = set(sys.modules), socket.socketpair()
executor, device = start_kernel_process(setup, connection), torch.device("cpu")
executor.use(device)
worker = Worker(device, None, lambda event: None, executor)
reference = {str(tmp_path / "kernel.py")!r} + ":Wrong"
worker.answer(Describe(reference))
for case in ("new_tokens:dims=small;q=[5,3]", "lse:dims=small;q=[4]", "decode:dims=small;q=[1];kv=[3]"):
    print(worker.answer(Judge(reference, case, explain="lse" in case)).record.status)
print(bool(worker.answer(Explore(reference, "combinations", Extent(2), (0, 1), 0, 1)).explored.causes))
print(sorted(set(sys.modules) - before))
"""
    (tmp_path / "kernel.py").write_text(WRONG + "\n    def attack(self, calls): ...\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:5] == ["fail", "fail", "unsupported", "True", "[]"], done.stdout + done.stderr


def test_what_is_written_while_a_run_judges_is_not_loaded_and_what_python_would_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "there_before.py").touch()
    refuse_written_since(time.time())
    try:
        time.sleep(0.05)  # a file's time may be as much behind the clock
        (tmp_path / "written_meanwhile.py").touch()
        importlib.invalidate_caches()
        importlib.import_module("there_before")
        with pytest.raises(ImportError, match=r"written_meanwhile\.py was written while the run judged"):
            importlib.import_module("written_meanwhile")
    finally:
        load_all_again()
    (tmp_path / "of-a-wheel.dist-info").mkdir()
    (tmp_path / "package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = deciding_files()
    for name in ("left.pth", "sitecustomize.py", "data.txt"):
        (tmp_path / name).touch()
    (tmp_path / "package.py").write_text("forged")
    changed = sorted({path for path, _ in before.items() ^ deciding_files(before).items()})
    assert changed == [tmp_path / name for name in ("left.pth", "package.py", "sitecustomize.py")]
