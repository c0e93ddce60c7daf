"""What CI systems and readers copy: templates that parse, commands that exist, pages that run as written."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mla_conformance.cases.case import Case
from mla_conformance.commands.parser import command_line
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.tests.nursery import UNEXPLAINED
from mla_conformance.vocabulary.capabilities import CAPABILITIES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("add-a-backend.md", "gate-your-repository.md", "tutorial.md")]
READ = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page not in PAGES
    and re.search(r"^```(?:ba)?sh\n(?:(?!^```)[\s\S])*?mla-conformance ", page.read_text("utf-8"), re.MULTILINE)
]
"""Pages whose commands want a GPU, a cluster, an engine, an index of packages or minutes, or do not end."""
HEAVY = ("call_order", "many_batches", "model_shapes")
"""Half of the time of a smoke run; the kernels of the pages need no other code for them."""
TEMPLATES = [ROOT / "ci" / name for name in ("github-actions.yml", "buildkite.yml")]
SCRIPTS = [ROOT / "ci" / "gate.sh", ROOT / ".ci" / "run"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def template(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "ci" / name).read_text(encoding="utf-8"))
    return loaded


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every call of ours in a text of shell, templates or pages."""
    for line in text.splitlines():
        bare = re.sub(r"\$\{\{.*?\}\}|\{\{.*?\}\}", "X", line).partition(" # ")[0]
        bare = re.sub(r'^(?:run|beside|   ) "(.*)"(?: \\)?$', r"\1", bare)
        for call in re.findall(r"(?:^|[\s!&])(?<!-n )mla-conformance ([^|&>]*)", bare):
            if not line.lstrip().startswith("#") and "`" not in call:
                yield [word for word in shlex.split(call) if word not in ("${expectations[@]}", "$@")]


@pytest.mark.parametrize("path", [*TEMPLATES, *SCRIPTS, *PAGES, *READ], ids=lambda path: path.name)
def test_every_command_is_one_that_exists(path: Path) -> None:
    shell = "\n".join(blocks(path, "bash") + blocks(path, "sh")) if path.suffix == ".md" else path.read_text()
    found = list(commands(shell))
    assert found
    for arguments in found:
        options, extra = command_line(COMMANDS, GROUPS).parse_known_args(arguments)
        assert callable(options.run) and (not extra or ("certify" in arguments and extra == ["${certify[@]}"])), (
            arguments
        )


def test_the_commands_of_the_page_of_findings_can_be_given() -> None:
    page = (ROOT / "docs" / "findings.md").read_text("utf-8")
    found = [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", page) if "mla-conformance " in span]
    assert len(found) > 6
    for name, *arguments in map(shlex.split, found):
        options = command_line(COMMANDS, GROUPS).parse_args(arguments)
        assert name == "mla-conformance" and callable(options.run)
        assert options.command != "replay" or Case.parse(options.case)


def test_github_judges_a_matrix_and_gates_what_it_found() -> None:
    jobs = template("github-actions.yml")["jobs"]
    judge, gate = jobs["judge"], jobs["gate"]
    assert judge["strategy"]["matrix"]["backend"] and judge["strategy"]["fail-fast"] is False
    assert gate["needs"] == "judge" and gate["if"] == "always()"
    used = [step.get("uses", "").partition("@")[0] for job in (judge, gate) for step in job["steps"]]
    assert used.index("actions/upload-artifact") < used.index("actions/download-artifact")
    annotated = next(step["run"] for step in judge["steps"] if step.get("name") == "Annotate")
    assert annotated.endswith("--format annotations") and "matrix" not in judge["env"]["REPORT"]
    last = gate["steps"][-1]
    assert last["shell"] == "bash" and " | tee" in last["run"] and "--require $REQUIRED" in last["run"]
    assert last["env"]["REQUIRED"].split() == judge["strategy"]["matrix"]["backend"]


@pytest.mark.parametrize("status", [0, 1])
def test_the_summary_is_closed_whatever_the_gate_says(tmp_path: Path, status: int) -> None:
    (tmp_path / "mla-conformance").write_text(f"#!/bin/sh\necho decided\nexit {status}\n", encoding="utf-8")
    (tmp_path / "mla-conformance").chmod(0o755)
    gate = template("github-actions.yml")["jobs"]["gate"]["steps"][-1]
    summary = tmp_path / "summary.md"
    environment = f"export GITHUB_STEP_SUMMARY={shlex.quote(str(summary))} REQUIRED=A\n"
    assert shell(environment + gate["run"], tmp_path, tmp_path).returncode == status
    assert summary.read_text("utf-8") == "```\ndecided\n```\n"


def test_buildkite_judges_a_matrix_and_gates_what_it_found() -> None:
    judge, gate = template("buildkite.yml")["steps"]
    assert judge["matrix"] and judge["artifact_paths"] == ["reports/**/*"]
    assert gate["depends_on"] == judge["key"] and gate["allow_dependency_failure"] is True
    assert f"--require {' '.join(judge['matrix'])} --" in gate["commands"][-1]


def test_templates_and_script_judge_and_decide_with_the_same_commands() -> None:
    for path in (*TEMPLATES, ROOT / "ci" / "gate.sh"):
        called = [arguments[0] for arguments in commands(path.read_text())]
        assert [each for each in called if each != "report"] == ["certify", "gate"]
        assert re.search(r"certify .* \|\| \[ \$?\$\? -ne 2 \]", path.read_text())


def shell(script: str | Path, folder: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or a text of one, that finds its programs in ``path`` first, then beside this Python."""
    environment = {**os.environ, UNEXPLAINED: "1", "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    call = ["bash", str(script), *arguments] if isinstance(script, Path) else ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_it_is_written(page: Path, tmp_path: Path, command: Path) -> None:
    for file, text in (("kernel.py", page), ("my_backend.py", ROOT / "docs" / "tutorial.md")):
        (tmp_path / file).write_text("".join(blocks(text, "python")), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "docs" / "examples")
    lighter = " ".join(f"--capability {name}" for name in CAPABILITIES if name not in HEAVY)
    script = re.sub(r"(certify --backend \S+ --tier smoke)", rf"\1 {lighter}", "\n".join(blocks(page, "bash")))
    finished = shell(script, tmp_path, command.parent)
    assert finished.returncode == 0, finished.stdout + finished.stderr


SMOKE = ("--tier", "smoke", "--", "--require-tier", "smoke")
NOTES = """#!/usr/bin/env bash
# Stands for the command: notes its arguments, and ends with the status that a file names.
echo "$*" >> calls
[ "$1" != certify ] || { mkdir -p "$5" && touch "$5/report.json"; }
exit "$(cat "status-$1" 2>/dev/null || echo 0)"
"""


@pytest.mark.parametrize(
    ("statuses", "status", "gated"),
    [({}, 0, True), ({"certify": 1}, 0, True), ({"certify": 3, "gate": 1}, 1, True), ({"certify": 2}, 1, False)],
)
def test_the_gate_script_leaves_failures_to_the_gate_and_stops_at_a_mistake(
    tmp_path: Path, statuses: dict[str, int], status: int, gated: bool
) -> None:
    command = tmp_path / "bin" / "mla-conformance"
    command.parent.mkdir()
    command.write_text(NOTES)
    command.chmod(0o755)
    for name, number in statuses.items():
        (tmp_path / f"status-{name}").write_text(str(number))
    (tmp_path / "ci" / "expectations").mkdir(parents=True)
    done = shell(ROOT / "ci" / "gate.sh", tmp_path, command.parent, "out", "EAGER TORCH_SDPA", *SMOKE)
    certified = [f"certify --backend {name} --out out/{name} --fresh --tier smoke" for name in ("EAGER", "TORCH_SDPA")]
    gate = "gate out/EAGER/report.json out/TORCH_SDPA/report.json --require EAGER TORCH_SDPA"
    gate += " --expectations ci/expectations --require-tier smoke"
    assert done.returncode == status, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ([*certified, gate] if gated else certified[:1])
