"""Kernels of the user's own in several files: scripts that hold the interface for all of them, or a reason why not."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.export.failing import reproduced
from mla_conformance.export.own import own_class
from mla_conformance.export.program import NotWritable
from mla_conformance.export.script import MOST_LINES, Ran, run_alone, script_of
from mla_conformance.tests.nursery import UNEXPLAINED
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
DECODE = "decode:call=decode;dims=small;heads=2;q=[1,1];kv=[9,40];page=16"
KERNEL = """
import torch
from mla_conformance.backends.decode import MLADecodeBackend
from {package}steps import DECLARED, attended, require_model_dtype


class Mine(MLADecodeBackend):
    declaration = DECLARED

    @staticmethod
    def get_name():
        return "MINE"

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


def ran(reference: str, script: Path) -> Ran:
    """A script of the decode, run alone."""
    text = script_of(reproduced(Subject.of(reference, CPU), Case.parse(DECODE)), script)
    script.write_text(text, encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES + 25
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


def test_a_kernel_in_three_files_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_in(tmp_path / "of" / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "of" / "mine"))
    found = ran(f"{tmp_path / 'of' / 'mine' / 'kernel.py'}:Mine", tmp_path / "repro.py")
    assert (found.status, found.verdict) == (0, "right"), found.printed
    (tmp_path / "of" / "mine" / "pages.py").unlink()
    again = run_alone(tmp_path / "repro.py")
    assert again.status == 2 and "(needs torch, kernel.py, steps.py, pages.py)" in again.printed


def test_a_kernel_in_a_package_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_in(tmp_path / "my_kernels", package=".", error=1.0)
    (tmp_path / "my_kernels" / "__init__.py").write_text("from mla_conformance.backends import interface\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ran("my_kernels.kernel:Mine", tmp_path / "repro.py")
    assert (found.status, found.verdict) == (1, "WRONG"), found.printed


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("from mla_conformance.backends.cache_dtypes import gather", "gather of mla_conformance.backends.cache"),
        ("from mla_conformance.backends.kernel import output_dtype", "output_dtype of mla_conformance.backends.kern"),
        ("import mla_conformance.backends.eager as eager", "mla_conformance.backends.eager,"),
        ("import mla_conformance", "mla_conformance,"),
    ],
)
def test_a_file_beside_the_kernel_that_computes_with_this_project_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str, said: str
) -> None:
    kernel_in(tmp_path)
    (tmp_path / "pages.py").write_text(f"{taken}\n{PAGES}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotWritable, match=re.escape(f"pages.py computes with {said}")):
        ran(f"{tmp_path / 'kernel.py'}:Mine", tmp_path / "repro.py")


def test_an_adapter_is_no_class_of_the_users_own() -> None:
    subject = Subject.of("TORCH_SDPA", CPU)
    assert own_class(subject, subject.class_of(Role.DECODE)) is None


def test_the_command_exports_what_stands_beside_the_current_folder(tmp_path: Path, command: Path) -> None:
    kernel_in(tmp_path, error=1.0)
    arguments = ["export", DECODE, "--backend", "kernel.py:Mine", "--device", "cpu", "--out", "repro.py"]
    environment = {**os.environ, UNEXPLAINED: "1"}
    done = subprocess.run([command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checked: without mla-conformance the call fails, too" in done.stdout
