"""A role from a file outside of the project, as docs/add-a-role.md says that one adds it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import CLASSES, FIELDS, Case
from mla_conformance.judging.record import Check, Status
from mla_conformance.roles.definition import DEFINITIONS
from mla_conformance.tests.drawn import judged
from mla_conformance.vocabulary.arrays import KEPT, SPACES, array_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES, FITTED, Tier, lists_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
WRONG = """
class OneTooFar(MyWindow):
    def attend(self, q, keys, window, sink):
        return super().attend(q, keys, window + 1, sink)
class ForgetsSinks(MyWindow):
    def attend(self, q, keys, window, sink):
        return super().attend(q, keys, window, None)
"""
TABLES: tuple[dict[Any, Any], ...] = (ROLES, CLASSES, FIELDS, DEFINITIONS, SPACES, CAPABILITIES)
OPERAND = '        sink: Annotated[Tensor | None, Form("N", torch.float32)],\n'


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The role's file in the current folder; what this process takes up of it, with a short array, goes again."""
    tables = (*TABLES, KEPT, sys.modules)
    for table in tables:
        for name in table:
            monkeypatch.setitem(table, name, table[name])
    before = [set(table) for table in tables]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FITTED, Tier.FULL, 6)
    copied = Path(shutil.copy(EXAMPLES / "window_decode.py", tmp_path))
    KEPT["window_combinations"] = ["window_combinations:call=window_decode;q=[1];kv=[5]"]
    yield copied
    Case.parse.cache_clear()
    array_of.cache_clear()
    lists_of.cache_clear()
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            del table[name]


def test_a_role_from_outside_is_judged_like_one_of_the_project(role: Path, command: Path, ours: Any) -> None:
    Path("my_window.py").write_text((EXAMPLES / "my_window.py").read_text() + WRONG)
    called = ["certify", "--role", role.name, "--backend=my_window.py:MyWindow", "--device=cpu", "-n1"]
    # With two a forked process can wait for those of its parent; they sleep: beside other tests each waits for a core.
    threads = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    few = [str(command), *called, "--out=few", "--tier=smoke", "--capability=window_sinks"]
    done = subprocess.run(few, capture_output=True, text=True, env=threads, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a role from outside, which is judged and never certified" in done.stdout + done.stderr
    digest = hashlib.sha256(role.read_bytes()).hexdigest()
    assert f"expected --role {role}, as it was: sha256:{digest}" in ours("report", "render", "few")[2]
    assert (shown := ours("report", "render", "few", "--role", role.name))[0] == 0 and "MyWindow ✔ right" in shown[1]
    assert ours(*called, "--out=run")[0] == 0
    for report in (json.loads(Path(run, "report.json").read_text()) for run in ("few", "run")):
        assert report["environment"]["role"] == f"{role}@sha256:{digest}"
    (right,) = report["backends"].values()
    assert right["pairs"]["window_decode"]["claimed"] == right["pairs"]["window_decode"]["judged"] > 0
    assert right["status"] == "pass" and 0 < right["capabilities"]["window_combinations"]["error_budget_used"] < 1
    events = map(json.loads, Path("run/journal.jsonl").read_text().splitlines())
    assert {each["record"]["role"] for each in events if each["event"] == "verdict"} == {report["environment"]["role"]}
    wrong = {"OneTooFar": (Check.LSE, "the output is wrong"), "ForgetsSinks": (Check.OUTPUT, "the LSE is right")}
    for name, (check, said) in wrong.items():
        record = judged(f"my_window.py:{name}", CAPABILITIES["window_sinks"].cases[1])
        assert (record.status, record.check) == (Status.FAIL, check) and said in record.message
        assert record.replay.endswith(f"--role {role}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", "expected one role, a RoleDefinition as docs/add-a-role.md has it, got none"),
        ('Role("window_decode"', 'Role("decode"', "role decode: the name is taken by a role of this project"),
        ('"run_window_decode")', '"run_decode")', "expected entries of its own, run_decode is one of role decode"),
        ('= ("window_decode",)', '= ("decode",)', "WindowCase.calls: decode is a call of role decode"),
        ("[window_sinks]", "[lse]", "capability lse: the name is taken"),
        (OPERAND, "", "run_window_decode: expected an operand sink, which the role's calls hand over, got none"),
        ('Annotated[Tensor, Form("T or more, N, R")]', "Tensor", "q_pe: expected a form of it, Annotated["),
        ("sink: bool", "sinks: bool", "expected a fact for WindowConfig.sinks, got none"),
        ("sink=large\n", "sink=huge\n", "field sink: expected one of none, drawn, large, got 'huge'"),
        ("    space=SPACE,\n", "", "role window_decode: expected a space of its own"),
    ],
)
def test_a_file_that_is_no_role_is_refused(role: Path, refused: Any, old: str, new: str, said: str) -> None:
    text = role.read_text()
    assert old in text
    role.write_text(text.replace(old, new, 1) if old else "")
    known = list(map(dict, TABLES))
    told = refused("certify", "--role", role.name, "--backend", "EAGER", "--device", "cpu")
    assert told.startswith(f"mla-conformance: --role {role.name}: ") and said in told and told.count("\n") == 1
    assert list(map(dict, TABLES)) == known


def test_a_role_from_outside_is_never_certified(role: Path, refused: Callable[..., str]) -> None:
    for option in ("--record", "--certificate", "--submission"):
        said = refused("certify", "--role", role.name, "--backend", "EAGER", f"{option}=mine.json")
        assert f"{option}: cannot be combined with --role, by whose file nothing is cert" in said


@pytest.mark.parametrize("name", ROLES)
def test_the_roles_of_the_project_say_all_that_one_from_outside_has_to(name: str) -> None:
    case = next(case for each in CAPABILITIES.values() for case in each.cases if case.role == name)
    DEFINITIONS[name].require_whole(case)
