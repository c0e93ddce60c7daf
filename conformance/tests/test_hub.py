"""Kernels of a hub and of several files of the user's own: judged, pinned, and scripts that hold the interface."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends import hub
from mla_conformance.backends.references import parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.certificate.pins import Pins
from mla_conformance.engine.request import RunRequest
from mla_conformance.export.inputs import NotWritable
from mla_conformance.export.script import MOST_LINES, own_class, run_alone, verdict_of
from mla_conformance.files.places import file_digest
from mla_conformance.gating.mustpass import Required
from mla_conformance.judging.record import Status
from mla_conformance.tests.nursery import UNEXPLAINED
from mla_conformance.tests.test_export import exported
from mla_conformance.trials.facts import describe
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_mla"
DECODE = "decode:call=decode;dims=small;heads=2;q=[1,1];kv=[9,40];page=16"
CPU, CASE = torch.device("cpu"), Case.parse(DECODE)
COMMIT, OTHER = "0123456789" * 4, "89abcdef01" * 4
STAND_IN = f"""
import os
from pathlib import Path
def install_kernel(repo_id, *, revision=None, version=None, local_files_only=False, trust_remote_code=False):
    Path(__file__).with_name("asked").open("a").write(f"{{repo_id}} {{revision}} {{version}} {{local_files_only}}\\n")
    commit = {{1: "{COMMIT}", 2: "{OTHER}"}}.get(version, revision)
    build = Path(__file__).parent / repo_id.replace("/", "--") / "snapshots" / commit / "build" / "torch-cpu"
    if not build.is_dir():
        raise FileNotFoundError(f"Cannot find a build variant\\nfor this system in {{repo_id}}")
    return build
"""


def build(folder: Path, adapter: bool = True) -> Path:
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "" if adapter else "conformance.py"))
    return folder


def wrong(folder: Path) -> None:
    path = folder / "__init__.py"
    path.write_text(path.read_text("utf-8").replace("scale * q", "2 * scale * q"), encoding="utf-8")


@pytest.fixture
def hub_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in has downloaded: version 1 of org/my-mla, right, and 2, wrong and without an adapter."""
    folder = tmp_path / "site"
    build(folder / "org--my-mla" / "snapshots" / COMMIT / "build" / "torch-cpu")
    wrong(build(folder / "org--my-mla" / "snapshots" / OTHER / "build" / "torch-cpu", adapter=False))
    (folder / "kernels.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    for kept in (hub._downloaded, hub._installed, hub.load):
        kept.cache_clear()
    return folder


def test_a_folder_is_judged_and_its_build_is_pinned(here: Path) -> None:
    package = build(here / "my-mla" / "build" / "torch-universal" / "my_mla")  # as older builds have it
    (backend,) = RunRequest.of(["hub:my-mla"], cases=[CASE.id]).backends
    assert (backend.name, backend.reference) == ("my-mla", f"hub:{here / 'my-mla'}")
    assert not any(str(here) in str(getattr(module, "__file__", "")) for module in list(sys.modules.values()))
    record = judge_one(Subject(backend, CPU), CASE, Context())
    facts = describe(Subject(backend, CPU))
    assert record.status is Status.PASS and record.evidence["build"] == "torch-universal"
    assert facts.fingerprint == f"hub {record.evidence['digest'][:12]}" and not facts.reasons
    loaded = {str(path): file_digest(path) for path in (package / "__init__.py", package / "conformance.py")}
    pinned = zip(("./__init__.py", "conformance.py"), loaded.values(), strict=True)
    assert Pins.of(backend, {}, loaded).sources.items() >= set(pinned)
    assert Required.asked("hub:my-mla")._is_named_by(facts)
    with pytest.raises(NotWritable, match="in a hub's repository"):
        own_class(Subject(backend, CPU), object)
    wrong(package)
    hub.load.cache_clear()
    assert describe(Subject(backend, CPU)).fingerprint != facts.fingerprint


def test_a_name_is_judged_at_the_commit_of_its_version(hub_of: Path, tmp_path: Path) -> None:
    (first,) = RunRequest.of(["hub:org/my-mla@1"], cases=[CASE.id]).backends
    adapter = shutil.copy(EXAMPLE / "conformance.py", tmp_path / "adapter.py")
    (second,) = RunRequest.of([f"hub:org/my-mla@2:{adapter}"], cases=[CASE.id]).backends
    assert (first.name, first.reference) == ("my-mla", f"hub:org/my-mla@{COMMIT}")
    assert second.reference == f"hub:org/my-mla@{OTHER}:{adapter}" and second.file == Path(adapter)
    assert parse_reference(first.reference) == first and (first.file, first.modules()) == (None, [])
    right, found = (judge_one(Subject(each, CPU), CASE, Context()) for each in (first, second))
    assert right.status is Status.PASS and found.status is Status.FAIL
    assert [each.evidence["revision"] for each in (right, found)] == [COMMIT, OTHER]
    asked = (hub_of / "asked").read_text().splitlines()
    by_commit = [f"org/my-mla {commit} None True" for commit in (COMMIT, OTHER)]
    assert asked == [f"org/my-mla None {version} False" for version in (1, 2)] + by_commit


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("hub:", "expected hub:org/name@version, or hub: and the folder of a repository, got no such folder"),
        ("hub:org/my-mla", "got no version"),
        ("hub:" + "a" * 100_000, "more characters': expected hub:org/name@version"),
        ("hub:org/my-mla@v3", "cannot be downloaded: FileNotFoundError: Cannot find a build variant for this system"),
        ("hub:org/my-mla@2", "expected an adapter, class Backend in "),
        ("hub:none", "expected a build for torch .*, got torch29-cxx11-cu126-sparc-linux in .*; build it"),
        ("hub:bare", "expected a Python package, got no __init__.py in "),
        ("hub:a b", "expected a folder whose name is of letters, "),
        ("hub:bare:gone.py", "expected a Python package"),
        ("hub:other", "no class Backend in .*; did you mean .*conformance.py:Mine"),
    ],
)
def test_what_cannot_be_judged_is_told(hub_of: Path, monkeypatch: Any, refused: Any, reference: str, said: str) -> None:
    monkeypatch.chdir(hub_of)
    for name in ("none/build/torch29-cxx11-cu126-sparc-linux", "bare/build/torch-universal", "a b"):
        Path(name).mkdir(parents=True)
    source = build(Path("other/build/torch-universal")) / "conformance.py"
    source.write_text(source.read_text("utf-8").replace("class Backend", "class Mine"), encoding="utf-8")
    error = refused("certify", "--backend", reference, "--device", "cpu")
    assert re.search(said, error) and error.count("\n") == 1 and len(error) < 1000 and "Traceback" not in error


def test_without_the_package_it_is_named_and_the_build_that_fits_best_is_taken(monkeypatch: Any, refused: Any) -> None:
    monkeypatch.setattr(hub, "_KERNELS", replace(hub._KERNELS, module="no_such_kernels"))
    said = refused("certify", "--backend", "hub:org/my-mla@9")
    assert "package kernels not installed (pip install 'mla-conformance[hub]')" in said
    here = f"{platform.machine()}-{platform.system().lower()}"
    ranked = ["torch-universal", "torch-cuda", f"torch29-cxx11-cu126-{here}", f"torch29-cu128-{here}"]
    ranked += [f"torch-stable-abi29-cu128-{here}"]
    others = (f"torch210-cu128-{here}", f"torch29-cu129-{here}", f"torch29-cu118-{here}", "torch-cpu", "torch-x")
    torch29 = {"__version__": "2.9.1+cu128", "cuda": "12.8", "hip": None}
    ranks = [hub._rank(variant, torch29) for variant in ranked]
    assert ranks == sorted(set(ranks)) and all(ranks)
    assert not any(hub._rank(variant, torch29) for variant in (*others, "torch29-cu128-x-linux"))


KERNEL = """
import torch
from mla_conformance.backends.decode import MLADecodeBackend
from {package}steps import DECLARED, attended, require_model_dtype
class Mine(MLADecodeBackend):
    declaration = DECLARED
    get_name = staticmethod(lambda: "MINE")
    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        require_model_dtype(self, ql_nope)
        return attended(self, torch.cat((ql_nope, q_pe), dim=-1), kv_cache)
"""
STEPS = """
import mla_conformance.backends.kernel as kernel
from mla_conformance.backends import declaration
from {package}pages import keys_of
DECLARED = declaration.Declaration(rounding=declaration.Rounding())
def require_model_dtype(backend, q):
    if not backend.supports_dtype(q.dtype):
        raise kernel.UnsupportedConfiguration(f"{{q.dtype}} is not supported")
def attended(backend, q, kv_cache):
    outputs, lses = [], []
    for row, keys in zip(q, keys_of(backend._decode_metadata, kv_cache)):
        scores = backend.scale * (row.float() @ keys.float().mT)
        p = scores.softmax(-1).to(q.dtype).float()
        outputs.append(p @ keys[:, : backend.kv_lora_rank].float())
        lses.append(scores.logsumexp(-1) + {error})
    return torch.stack(outputs).to(q.dtype), torch.stack(lses, dim=1)
import torch
"""
PAGES = """
from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.slots import slots_of
class AnotherRole(SelectedKeysBackend): ...
def keys_of(metadata: MLACommonDecodeMetadata, kv_cache):
    page = kv_cache.shape[1]
    for slots, length in zip(slots_of(metadata, page), metadata.seq_lens.tolist()):
        yield kv_cache[slots[:length] // page, slots[:length] % page]
"""


def kernel_in(folder: Path, package: str = "", error: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.py").write_text(KERNEL.format(package=package))
    (folder / "steps.py").write_text(STEPS.format(package=package, error=error))
    (folder / "pages.py").write_text(PAGES)


def ran(reference: str, script: Path) -> subprocess.CompletedProcess[str]:
    assert len(exported(reference, DECODE, script).splitlines()) <= MOST_LINES + 25
    return run_alone(script)


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch, python: Path) -> Iterator[None]:
    """Modules that a test imports are not those of another test; scripts run in forked processes."""
    monkeypatch.setattr(sys, "executable", str(python))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("steps", "pages", "my_kernels"):
            del sys.modules[name]


def test_a_kernel_in_three_files_or_a_package_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_in(folder := tmp_path / "of" / "mine")
    monkeypatch.syspath_prepend(str(folder))
    found = ran(f"{folder / 'kernel.py'}:Mine", tmp_path / "repro.py")
    assert (found.returncode, verdict_of(found)) == (0, "right"), found.stdout
    (folder / "pages.py").unlink()
    again = run_alone(tmp_path / "repro.py")
    assert again.returncode == 2 and "(needs torch, kernel.py, steps.py, pages.py)" in again.stdout
    kernel_in(tmp_path / "my_kernels", package=".", error=1.0)
    (tmp_path / "my_kernels" / "__init__.py").write_text("from mla_conformance.backends import interface\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ran("my_kernels.kernel:Mine", tmp_path / "repro.py")
    assert (found.returncode, verdict_of(found)) == (1, "WRONG"), found.stdout


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("from mla_conformance.backends.cache_dtypes import gather", "gather of mla_conformance.backends.cache"),
        ("from mla_conformance.backends.kernel import output_dtype", "output_dtype of mla_conformance.backends.kern"),
        ("from mla_conformance.backends.eager import EagerPrefillBackend", "EagerPrefillBackend of mla_conformance."),
        ("import mla_conformance.backends.eager as eager", "mla_conformance.backends.eager,"),
        ("import mla_conformance", "mla_conformance,"),
    ],
)
def test_a_file_that_computes_with_us_is_named(tmp_path: Path, monkeypatch: Any, taken: str, said: str) -> None:
    kernel_in(tmp_path)
    (tmp_path / "pages.py").write_text(f"{taken}\n{PAGES}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotWritable, match=re.escape(f"pages.py computes with {said}")):
        ran(f"{tmp_path / 'kernel.py'}:Mine", tmp_path / "repro.py")


def test_the_command_exports_what_stands_beside_the_current_folder(tmp_path: Path, command: Path) -> None:
    kernel_in(tmp_path, error=1.0)
    arguments = ["export", DECODE, "--backend", "kernel.py:Mine", "--device", "cpu", "--out", "repro.py"]
    environment = {**os.environ, UNEXPLAINED: "1"}
    done = subprocess.run([command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checked: without mla-conformance the call fails, too" in done.stdout
