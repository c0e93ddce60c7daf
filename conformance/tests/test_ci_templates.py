"""What CI systems, clusters and readers copy: templates and pages that run as written, commands that exist."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT
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
OURS = re.compile(r"^```(?:ba)?sh\n(?:(?!^```)[\s\S])*?mla-conformance ", re.MULTILINE)
READ = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page not in PAGES]
READ = [page for page in READ if OURS.search(page.read_text("utf-8"))]
"""Pages whose commands want a GPU, a cluster, an engine, an index of packages or minutes, or do not end."""
HEAVY = ("call_order", "many_batches", "model_shapes")
"""Half of the time of a smoke run; the kernels of the pages need no other code for them."""
TEMPLATES = [ROOT / "ci" / name for name in ("github-actions.yml", "buildkite.yml")]
SCRIPTS = [ROOT / "ci" / "gate.sh", ROOT / ".ci" / "run"]
FINDINGS = ROOT / "docs" / "findings.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        bare = re.sub(r"\$\{\{.*?\}\}|\{\{.*?\}\}", "X", line).replace("$$", "$").partition(" # ")[0]
        bare = re.sub(r'^(?:run|beside|   ) "(.*)"(?: \\)?$', r"\1", bare)
        for call in re.findall(r"(?:^|[\s!&])(?<!-n )mla-conformance ([^|&>]*)", bare):
            if not line.lstrip().startswith("#") and "`" not in call:
                yield [word for word in shlex.split(call) if word not in ("${expectations[@]}", "$@")]


@pytest.mark.parametrize("path", [*TEMPLATES, *SCRIPTS, *PAGES, *READ, FINDINGS], ids=lambda path: path.name)
def test_every_command_is_one_that_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    shell = "\n".join(blocks(path, "bash") + blocks(path, "sh")) if path.suffix == ".md" else text
    if path == FINDINGS:  # whose commands stand in its text
        shell = "\n".join(" ".join(span.split()) for span in re.findall(r"`([^`]*)`", text) if "mla-conf" in span)
    found = list(commands(shell))
    assert len(found) > 6 * (path == FINDINGS)
    for arguments in found:
        options, extra = command_line(COMMANDS, GROUPS).parse_known_args(arguments)
        assert callable(options.run), arguments
        assert path != FINDINGS or options.command != "replay" or Case.parse(options.case)
        assert not extra or ("certify" in arguments and extra == ["${certify[@]}"]), arguments


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("status", [0, 1])
def test_the_summary_is_closed_whatever_the_gate_says(tmp_path: Path, status: int) -> None:
    program(tmp_path / "mla-conformance", f"#!/bin/sh\necho decided\nexit {status}\n")
    gate = yaml.safe_load((ROOT / "ci" / "github-actions.yml").read_text("utf-8"))["jobs"]["gate"]["steps"][-1]
    summary = tmp_path / "summary.md"
    told = {"GITHUB_STEP_SUMMARY": str(summary), "REQUIRED": "A"}
    ran([*BASH, gate["run"]], tmp_path, tmp_path, status, **told)
    assert summary.read_text("utf-8") == "```\ndecided\n```\n"


BASH = ["bash", "-euo", "pipefail", "-c"]


def ran(command: list[str], folder: Path, path: Path, status: int = 0, **variables: str) -> str:
    """What a command prints that ends so; it finds programs in ``path`` first, then beside this Python."""
    found = f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, UNEXPLAINED: "1", "PATH": found, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_it_is_written(page: Path, tmp_path: Path, command: Path) -> None:
    for file, text in (("kernel.py", page), ("my_backend.py", ROOT / "docs" / "tutorial.md")):
        (tmp_path / file).write_text("".join(blocks(text, "python")), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "docs" / "examples")
    lighter = " ".join(f"--capability {name}" for name in CAPABILITIES if name not in HEAVY)
    script = re.sub(r"(certify --backend \S+ --tier smoke)", rf"\1 {lighter}", "\n".join(blocks(page, "bash")))
    script = script.replace("mla-conformance capabilities\n", "")  # of all roles, which takes seconds
    # The decode of a hub's folder is nearly that of a file before it.
    hub = r"(certify --backend hub:\S+ --tier smoke)"
    script = re.sub(rf"{hub} .*? --device", r"\1 --capability decode_lse --device", script)
    ran([*BASH, script], tmp_path, command.parent)


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
def test_the_gate_script_stops_at_a_mistake_alone(tmp_path: Path, statuses: Any, status: int, gated: bool) -> None:
    command = program(tmp_path / "bin" / "mla-conformance", NOTES)
    for name, number in statuses.items():
        (tmp_path / f"status-{name}").write_text(str(number))
    (tmp_path / "ci" / "expectations").mkdir(parents=True)
    called = ["bash", str(ROOT / "ci" / "gate.sh"), "out", "EAGER TORCH_SDPA", *SMOKE]
    ran(called, tmp_path, command.parent, status)
    certified = [f"certify --backend {name} --out out/{name} --fresh --tier smoke" for name in ("EAGER", "TORCH_SDPA")]
    gate = "gate out/EAGER/report.json out/TORCH_SDPA/report.json --require EAGER TORCH_SDPA"
    gate += " --expectations ci/expectations --require-tier smoke"
    assert (tmp_path / "calls").read_text().splitlines() == ([*certified, gate] if gated else certified[:1])


FEW = "--device cpu --capability strided_inputs --tier smoke -n1"
EDITS = {"--device cuda": FEW, " --must-pass": " --require-tier none"}
"""What is edited in every template before it is run: the list is the smallest that makes two shards."""
KNOWN = "[ ! -d ci/expectations ] || expectations=(--expectations ci/expectations)"
"""What every template looks for, since git keeps no empty folder; the checkout in which they run has none."""
COMMAND = """#!/usr/bin/env bash
# The command, but what was judged by the same arguments is not judged again for another template.
[ "$1" = certify ] || exec {command} "$@"
arguments=()
while (($#)); do
    case $1 in --out) out=$2 && shift 2 ;; --fresh) shift ;; *) arguments+=("$1") && shift ;; esac
done
kept={kept}/$(printf '%s\\n' "${{arguments[@]}}" | sha256sum | cut -c1-16)
[ -e "$kept" ] || {command} "${{arguments[@]}}" --out "$kept" || exit
mkdir -p "$out" && cp "$kept"/* "$out"
"""
SBATCH = """#!/usr/bin/env bash
# Stands for Slurm: the tasks of an array run one after another, as processes of their own; that in $DEAD is not run.
while [[ $1 == --* ]]; do
    case $1 in --array=1-*) tasks=${1#--array=1-} ;; --output=*) log=${1#--output=} ;; esac
    shift
done
[ -n "${tasks:-}" ] || exec bash "$@" > "$log" 2>&1
for ((task = 1; task <= tasks; task++)); do
    [ "$task" = "${DEAD:-}" ] || SLURM_ARRAY_TASK_ID=$task bash "$@" > "${log/\\%a/$task}" 2>&1
done
echo "17;cluster"
"""
OPEN = re.compile(r"^gate open · (.* · )?2 verdicts$", re.MULTILINE)
IDLE = "#!/bin/sh\n# Stands for what installs, and for what moves files from machine to machine.\n"
DIED = "2/report.json: cannot be read: No such file or directory"


@pytest.fixture
def machine(tmp_path: Path, once: Callable[[str, Callable[[Path], None]], Path], command: Path) -> Path:
    programs = {"bin/mla-conformance": COMMAND.format(command=command, kept=once("runs", lambda folder: None))}
    programs |= {"bin/sbatch": SBATCH, ".venv/bin/activate": ""}
    programs |= dict.fromkeys(("bin/python3", "bin/pip", "bin/buildkite-agent", ".venv/bin/pip"), IDLE)
    for name, text in programs.items():
        program(tmp_path / name, text)
    return tmp_path


def edited(name: str, edits: dict[str, str]) -> str:
    text = (ROOT / "ci" / name).read_text(encoding="utf-8")
    assert KNOWN in text and '{expectations[@]}" --must-pass' in text
    for old, new in {**EDITS, **edits}.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run_steps(machine: Path, commands: str, **variables: str) -> str:
    return ran(["bash", "-eo", "pipefail", "-c", commands], machine, machine / "bin", 0, **variables)


WANTED = "FLASH_ATTN[fa3] FLASHINFER CUDNN"
"""The backends of both matrices, which both gates require."""


def test_github_actions(machine: Path) -> None:
    jobs = yaml.safe_load(edited("github-actions.yml", {f"REQUIRED: {WANTED} #": "REQUIRED: TORCH_SDPA #"}))["jobs"]
    judge, gate = jobs["judge"], jobs["gate"]
    assert judge["strategy"]["matrix"]["backend"] == WANTED.split() and judge["strategy"]["fail-fast"] is False
    assert gate["needs"] == "judge" and gate["if"] == "always()"
    steps = [*judge["steps"], *gate["steps"]]
    used = [step.get("uses", "").partition("@")[0] for step in steps]
    assert used.index("actions/upload-artifact") < used.index("actions/download-artifact")
    annotated = next(step["run"] for step in judge["steps"] if step.get("name") == "Annotate")
    assert annotated.endswith("--format annotations") and "matrix" not in judge["env"]["REPORT"]
    last = steps[-1]
    assert last["shell"] == "bash" and " | tee" in last["run"] and "--require $REQUIRED" in last["run"]
    assert last["env"]["REQUIRED"] == "TORCH_SDPA"
    github = {name: str(machine / "told") for name in ("GITHUB_PATH", "GITHUB_STEP_SUMMARY")}
    variables = {"BACKEND": "TORCH_SDPA", "REPORT": "reports/0", "MLA_CONFORMANCE": "mla-conformance", **github}
    for step in steps:
        printed = run_steps(machine, step["run"], **variables, **step.get("env", {})) if "run" in step else ""
    assert OPEN.search(printed)
    assert OPEN.search((machine / "told").read_text())


def test_buildkite(machine: Path) -> None:
    required = {f"--require {WANTED} ": "--require TORCH_SDPA "}
    judge, gate = yaml.safe_load(edited("buildkite.yml", required))["steps"]
    assert judge["matrix"] == WANTED.split() and judge["artifact_paths"] == ["reports/**/*"]
    assert gate["depends_on"] == judge["key"] and gate["allow_dependency_failure"] is True
    assert "--require TORCH_SDPA " in gate["commands"][-1]
    for step in (judge, gate):
        # As the agent's upload does it: a name of the matrix for its place, and $ for $$.
        commands = "\n".join(step["commands"]).replace("{{matrix}}", "TORCH_SDPA").replace("$$", "$")
        printed = run_steps(machine, commands, MLA_CONFORMANCE="mla-conformance", BUILDKITE_JOB_ID="0-1")
    assert OPEN.search(printed)


@pytest.mark.parametrize("dead", ["", "2"])
def test_slurm(machine: Path, dead: str) -> None:
    (machine / "slurm.sh").write_text(edited("slurm.sh", {"shards=8": "shards=2"}))
    lacks = bool(dead)
    assert_gated(ran(["bash", "slurm.sh", "TORCH_SDPA"], machine, machine / "bin", int(lacks), DEAD=dead), lacks)
    assert dead or "shard 2/2 of 2" in next(machine.glob("reports/*/2.log")).read_text()


def assert_gated(printed: str, lacks: bool) -> None:
    assert bool(OPEN.search(printed)) is not lacks
    assert not lacks or (DIED in printed and "gate" not in printed)


@pytest.mark.parametrize("indices", [(0, 1), (0,)])
def test_kubernetes(machine: Path, indices: tuple[int, ...]) -> None:
    edits = {'"8"': '"2"', "FLASH_ATTN": "TORCH_SDPA", "/reports/$RUN": f"{machine}/reports/r1", '"7200"': '"0"'}
    judge, gate = yaml.safe_load_all(edited("kubernetes.yml", edits))
    assert judge["spec"]["completionMode"] == "Indexed"
    for index in indices:
        run_pod(machine, judge, JOB_COMPLETION_INDEX=str(index))
    lacks = len(indices) == 1
    assert_gated(run_pod(machine, gate, int(lacks)), lacks)


def run_pod(machine: Path, job: Any, status: int = 0, **variables: str) -> str:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    named = {each["name"]: each["value"] for each in container["env"]}
    return ran(container["command"] + container["args"], machine, machine / "bin", status, **named, **variables)
