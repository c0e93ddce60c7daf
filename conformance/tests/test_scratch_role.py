"""A new role is one folder and at most five edits elsewhere: one is added to a copy of the project and judged there."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_EDITS = 5

FOLDER: Mapping[str, str] = {
    "__init__.py": '"""Scratch: plain attention of queries to keys."""\n',
    "case.py": """
from dataclasses import dataclass

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case


@dataclass(frozen=True, kw_only=True)
class ScratchCase(Case):
    role = Role.SCRATCH
    calls = (Call.SCRATCH,)
    has_context = is_causal = False
    profile, asks = "scratch", ()

    def varied(self):
        return self
""",
    "lists.py": """
def scratch():
    yield {"call": "scratch", "q": (5, 3), "dims": "small"}
""",
    "role.py": """
from dataclasses import dataclass

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.operands import Draw, start_loc
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.definition import RoleDefinition, kernel_sizes


@dataclass(frozen=True, kw_only=True)
class ScratchCall(AttentionCall):
    name, returns_lse = "scratch", True

    def owned(self):
        return {"q": self.q, "k": self.k, "v": self.v}

    def regrouped(self, case, requests, queries):
        raise NotImplementedError

    def prepare(self, backend):
        backend.prepare_metadata(self.query_start_loc)

    def invoke(self, backend, out):
        return backend.run_scratch(self.q, self.k, self.v)

    def operands(self):
        return AttentionOperands(self.q, self.k, self.v, self.query_start_loc, self.key_start_loc, False)


def scratch_problem(case, device, salt):
    draw, dims = Draw(case, device, salt), case.dimensions
    widths = (dims.qk_head_dim, dims.qk_head_dim, dims.v_head_dim)
    q, k, v = (torch.randn(sum(case.q), case.heads, width, generator=draw.generator).to(draw.dtype) for width in widths)
    call = ScratchCall(q=q, k=k, v=v, query_start_loc=start_loc(case.q), key_start_loc=start_loc(case.q))
    return Problem(case, draw.key, device, (call,))


SCRATCH = RoleDefinition(
    role=Role.SCRATCH,
    problem=scratch_problem,
    kernel=lambda kernel, case, *_: kernel(**kernel_sizes(case)),
    reasons=lambda *_: [],
)
""",
}
PACKAGE = '    "mla_conformance.roles.sparse",\n'
EDITS: Mapping[str, Mapping[str, str]] = {
    "backends/roles.py": {
        '    INDEXER = "indexer"\n': '    INDEXER = "indexer"\n    SCRATCH = "scratch"\n',
        "    Role.INDEXER: (*": '    Role.SCRATCH: (*_EVERY, "run_scratch"),\n    Role.INDEXER: (*',
    },
    "conformance/cases/case.py": {'    LAYER = "layer"\n': '    LAYER = "layer"\n    SCRATCH = "scratch"\n'},
    "conformance/roles/table.py": {
        "ROLES = (": "from mla_conformance.roles.scratch.role import SCRATCH\n\nROLES = (",
        "PREPARE, CACHE)": "PREPARE, CACHE, SCRATCH)",
    },
    "conformance/vocabulary/capabilities.toml": {
        "[new_tokens]\n": '[scratch]\nclause = "1.1"\ndefinition = "It is right."\ncases = ["scratch.scratch"]\n'
        "\n[new_tokens]\n",
    },
    "pyproject.toml": {PACKAGE: PACKAGE + PACKAGE.replace("sparse", "scratch")},
}
KERNEL = """
import torch


class {name}:
    supported_dtypes = [torch.bfloat16]

    def __init__(self, scale, **_):
        self.scale = scale

    get_name = staticmethod(lambda: "{name}")
    is_available = supports_compute_capability = supports_dtype = staticmethod(lambda *_: True)
    validate_configuration = staticmethod(lambda *_: [])

    def prepare_metadata(self, start_loc):
        self.start_loc = start_loc

    def run_scratch(self, q, k, v):
        output, lse = torch.zeros_like(q[..., : v.shape[-1]]), torch.zeros(q.shape[1], q.shape[0])
        for first, last in zip(self.start_loc, self.start_loc[1:]):
            x, y, z = (t[first:last].float().transpose(0, 1) for t in (q, k, v))
            scores = x @ y.mT * self.scale {mistake}
            output[first:last] = (scores.softmax(-1) @ z).transpose(0, 1)
            lse[:, first:last] = scores.logsumexp(-1)
        return output, lse
"""


def copied(folder: Path) -> Path:
    """An import path over the checkout's files, of which those that are edited are copies."""
    package = folder / "mla_conformance"
    for source in (*(ROOT / "conformance").iterdir(), *(ROOT / name for name in ("backends", "reference", "fixtures"))):
        if source.name not in ("tests", "__pycache__"):
            link(source, package / source.name)
    for path, changes in EDITS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, f"{path}: {old!r} stands there {text.count(old)} times"
            text = text.replace(old, new)
        target = package / path.removeprefix("conformance/")
        target.unlink(missing_ok=True)
        target.write_text(text, encoding="utf-8")
    for name, text in FOLDER.items():
        target = package / "roles" / "scratch" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def link(source: Path, target: Path) -> None:
    """Files one by one in the folders that an edit reaches, others as they are."""
    opened = {part for path in EDITS for part in Path(path).parts[:-1]}
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and source.name in opened:
        for inner in source.iterdir():
            link(inner, target / inner.name)
    else:
        target.symlink_to(source)


def test_a_new_role_is_a_folder_and_few_edits(tmp_path: Path) -> None:
    assert len(EDITS) <= MOST_EDITS
    kernels = tmp_path / "kernels.py"
    mistakes = {"Right": "", "Wrong": "* 1.1"}
    kernels.write_text("".join(KERNEL.format(name=name, mistake=mistake) for name, mistake in mistakes.items()))
    site = copied(tmp_path / "site")
    command = [sys.executable, "-P", "-m", "mla_conformance", "certify", "--capability", "scratch", "--device", "cpu"]
    command += [part for name in mistakes for part in ("--backend", f"{kernels}:{name}")]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([*command, "--out", "out"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert {name: reported["status"] for name, reported in report["backends"].items()} == {
        "Right": "pass",
        "Wrong": "fail",
    }
