"""Kernels of a hub: builds in a folder, and repositories that a stand-in for the package `kernels` has downloaded."""

import platform
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_conformance.backends import hub
from mla_conformance.backends.references import parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.certificate.pins import Pins
from mla_conformance.cli import main
from mla_conformance.engine.request import RunRequest
from mla_conformance.export.own import own_class
from mla_conformance.export.program import NotWritable
from mla_conformance.files.places import file_digest
from mla_conformance.gating.mustpass import Required
from mla_conformance.judging.verdict import Status
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject, describe
from mla_conformance.trials.trial import Context

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_mla"
CPU, CASE = torch.device("cpu"), Case.parse("decode:call=decode;dims=small;heads=2;q=[1,1];kv=[9,40];page=16")
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


def test_a_folder_is_judged_and_its_build_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = build(tmp_path / "my-mla" / "build" / "torch-universal" / "my_mla")  # as older builds have it
    (backend,) = RunRequest.of(["hub:my-mla"], cases=[CASE.id]).backends
    assert (backend.name, backend.reference) == ("my-mla", f"hub:{tmp_path / 'my-mla'}")
    assert not any(str(tmp_path) in str(getattr(module, "__file__", "")) for module in list(sys.modules.values()))
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
    assert asked == [f"org/my-mla None {version} False" for version in (1, 2)] + [
        f"org/my-mla {commit} None True" for commit in (COMMIT, OTHER)
    ]


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
def test_what_cannot_be_judged_is_one_sentence(
    hub_of: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reference: str, said: str
) -> None:
    monkeypatch.chdir(hub_of)
    for name in ("none/build/torch29-cxx11-cu126-sparc-linux", "bare/build/torch-universal", "a b"):
        Path(name).mkdir(parents=True)
    source = build(Path("other/build/torch-universal")) / "conformance.py"
    source.write_text(source.read_text("utf-8").replace("class Backend", "class Mine"), encoding="utf-8")
    assert main(["certify", "--backend", reference, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1 and len(error) < 1000 and "Traceback" not in error


def test_without_the_package_a_name_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "_KERNELS", replace(hub._KERNELS, module="no_such_kernels"))
    assert main(["certify", "--backend", "hub:org/my-mla@9"]) == 2
    assert "package kernels not installed (pip install 'mla-conformance[hub]')" in capsys.readouterr().err


def test_the_build_that_fits_best_is_taken() -> None:
    here = f"{platform.machine()}-{platform.system().lower()}"
    ranked = ("torch-universal", "torch-cuda", f"torch29-cxx11-cu126-{here}", f"torch29-cu128-{here}")
    best = (f"torch-stable-abi29-cu128-{here}",)
    others = (f"torch210-cu128-{here}", f"torch29-cu129-{here}", f"torch29-cu118-{here}", "torch-cpu", "torch-x")
    torch29 = {"__version__": "2.9.1+cu128", "cuda": "12.8", "hip": None}
    ranks = [hub._rank(variant, torch29) for variant in (*ranked, *best)]
    assert ranks == sorted(set(ranks)) and all(ranks)
    assert not any(hub._rank(variant, torch29) for variant in (*others, "torch29-cu128-x-linux"))
