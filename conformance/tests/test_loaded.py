"""What a backend's process loads and runs is known: files by path and the bytes that ran, kernels by name."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.driving.driver import IN_PROCESS
from mla_conformance.driving.loaded import Loaded, LoadedCode
from mla_conformance.engine.messages import Trace
from mla_conformance.engine.worker import Worker
from mla_conformance.files.places import file_digest
from mla_conformance.judging.record import Traced
from mla_conformance.report.outcome import ran
from mla_conformance.trials import facts

LOADS = """
import ctypes, importlib, importlib.util, json, os, py_compile, shutil, sys, threading, time, zipfile
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from mla_conformance.driving.loaded import LOADED, loaded_libraries, newly_loaded
here = Path(sys.argv[1])
def write(name, value="right"):
    path = here / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"VALUE = {value!r}\\n")
    return path
def compiled(name, mode, value):
    '''A module whose cached bytecode is of another source.'''
    path = write(name, value)
    before = path.stat()
    py_compile.compile(str(path), invalidation_mode=mode)
    write(name, "x" * len(value))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path
for name in "plain computed removed threaded by_spec by_loader package/__init__ package/inner".split():
    write(name)
compiled("unchecked", py_compile.PycInvalidationMode.UNCHECKED_HASH, "evil")
compiled("timed", py_compile.PycInvalidationMode.TIMESTAMP, "evil")
compiled("wheels/unlisted", py_compile.PycInvalidationMode.TIMESTAMP, "evil")
(here / "wheels" / "a.dist-info").mkdir()
(here / "wheels" / "a.dist-info" / "RECORD").write_text("a/__init__.py,,\\n")
sys.path.append(str(here / "wheels"))
py_compile.compile(str(write("sourceless")), str(here / "sourceless.pyc"))
(here / "sourceless.py").unlink()
with zipfile.ZipFile(here / "zipped.zip", "w") as archive:
    archive.writestr("in_a_zip.py", "VALUE = 'right'")
library = min(loaded_libraries(), key=lambda path: Path(path).stat().st_size)
shutil.copy(library, here / "kernel.so.1")
time.sleep(0.05)
LOADED.watch(time.time())
time.sleep(0.05)
sys.path[:0] = [str(here), str(here / "zipped.zip")]
import plain, unchecked, timed, sourceless, in_a_zip, package.inner
import unlisted, removed
importlib.import_module("comp" + "uted")
del sys.modules["removed"]
thread = threading.Thread(target=importlib.import_module, args=("threaded",)); thread.start(); thread.join()
spec = importlib.util.spec_from_file_location("other_name", here / "by_spec.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
SourceFileLoader("third_name", str(here / "by_loader.py")).load_module()
ctypes.CDLL(str(here / "kernel.so.1"))
generator = write("generated")
importlib.invalidate_caches()
importlib.import_module("generated")
names = "plain unchecked timed sourceless in_a_zip package.inner unlisted computed generated".split()
values = {name: sys.modules[name].VALUE for name in names}
write("plain", "again")
importlib.reload(plain)
import colorsys
found = newly_loaded()
print(json.dumps([found.found, found.generated, values, list(newly_loaded().found)]))
"""
FOUND = ["computed.py", "removed.py", "threaded.py", "by_spec.py", "by_loader.py", "package/__init__.py"]
FOUND += ["package/inner.py", "unchecked.py", "timed.py", "sourceless.pyc", "zipped.zip", "kernel.so.1", "plain.py"]
FOUND += ["wheels/unlisted.py"]


def test_every_way_of_loading_a_file_is_noted_and_what_runs_is_the_source(tmp_path: Path) -> None:
    """No bytecode beside it; of what came to be meanwhile, its generator counts, and Python's own is no backend's."""
    folder = tmp_path.resolve()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOADS, folder], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found, generated, values, again = json.loads(done.stdout)
    digests = {str(folder / name): file_digest(folder / name) for name in FOUND}
    assert found == digests | {str(folder / "plain.py"): hashlib.sha256(b"VALUE = 'right'\n").hexdigest()}
    assert generated == {str(folder / name): file_digest(folder / name) for name in ("generated.py", "plain.py")}
    assert {name for name, value in values.items() if value == "xxxx"} == {"unchecked", "timed", "unlisted"}
    assert again == []


ONE, TWO = {"a": "1"}, {"a": "2"}
AGREE = [Loaded(ONE), Loaded({"a": "1", "b": "2"})], [Loaded({}, ONE), Loaded({}, TWO)], [Loaded({}, ONE), Loaded(TWO)]
CONFLICT = [Loaded(ONE), Loaded(TWO)], [Loaded(ONE), Loaded({}, TWO)], [Loaded(ONE, TWO)]


@pytest.mark.parametrize("told", [*AGREE, *CONFLICT])
def test_one_path_has_one_digest_in_all_processes(told: list[Loaded]) -> None:
    code = LoadedCode()
    for each in told:
        code.add(each)
    assert code.conflicts == ({"a"} if told in CONFLICT else set())


def test_what_differs_from_what_was_loaded_is_named_whatever_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "helper.py"
    path.write_text("before")
    code = LoadedCode({str(path): file_digest(path)})
    changes: list[Any] = [lambda: path.write_text("before"), lambda: path.write_text("other"), path.unlink, path.mkdir]
    for number, change in enumerate(changes):
        change()
        assert code.changed() == [str(path)] * (number > 0)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    code = LoadedCode({str(tmp_path / "gone" / "mine.py"): "1"})
    (tmp_path / "gone").rmdir()
    assert list(code.own.values()) == ["1"]


CPU = torch.device("cpu")
FILL = "void at::native::vectorized_elementwise_kernel<4, FillFunctor>"


def test_the_kernels_of_torch_itself_are_left_out_and_the_rest_is_named() -> None:
    seen = Traced({"lse": ("Memset (Device)", "flash::fwd", FILL), "dcp": ("flash::fwd", "merge")})
    assert seen.distinct == ("flash::fwd", "merge")
    assert list(ran(seen)) == ["kernels seen: flash::fwd, merge"]
    assert list(ran(Traced({"lse": ("a", "b", "c" * 200)}))) == ["kernels seen: a, b and 1 more"]
    templated = "void flash::(anonymous namespace)::fwd_kernel<traits<192, 128>, bool>(params)"
    assert list(ran(Traced({"lse": (templated, templated.replace("192", "64"))}))) == [
        "kernels seen: flash::(anonymous namespace)::fwd_kernel"
    ]
    assert list(ran(Traced())) == []
    assert list(ran(Traced({"lse": (FILL,)}))) == ["only generic kernels of torch were seen to run, none of a library"]


def test_a_worker_measures_one_case_of_each_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[str, ...]:
        call()
        return ("seen",)

    monkeypatch.setattr(facts, "kernels_of", kernels_of)
    cases = {"refusals": "refusals:q=[9];dtype=fp64;heads=2", "lse": "lse:dims=small;heads=2;q=[5,9]"}
    cases["dtypes"] = "dtypes:dims=small;heads=2;q=[5];dtype=fp16"
    answer = Worker(CPU, None, lambda event: None, IN_PROCESS).answer(Trace("EAGER", cases))
    traced = answer.found.traced
    assert traced and traced.kernels == {"lse": ("seen",), "dtypes": ("seen",)} and answer.leaves

    # A call that raises while it is measured takes nothing from the verdicts.
    monkeypatch.setattr(facts, "kernels_of", Mock(side_effect=RuntimeError("the profiler is in use")))
    answer = Worker(CPU, None, lambda event: None, IN_PROCESS).answer(Trace("EAGER", {"lse": "lse:q=[4]"}))
    assert answer.found.traced == Traced() and answer.leaves


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_the_kernels_of_a_call() -> None:
    a = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    names = facts.kernels_of(lambda: a @ a, a.device)
    assert names and Traced({"product": names}).distinct
