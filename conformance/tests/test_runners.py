"""The templates for CI systems and clusters, run as they are written: what their machines do, as processes here."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EDITS = {
    "--device cuda": "--device cpu --capability softmax_scale --tier smoke -n1",
    " --must-pass": " --require-tier none",
}
"""What is edited in every template before it is run: the list is the smallest that makes two shards."""
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
    """A folder with a checkout and an installed environment; the programs of a runner stand in ``bin``."""
    programs = {"bin/mla-conformance": COMMAND.format(command=command, kept=once("runs", lambda folder: None))}
    programs |= {"bin/sbatch": SBATCH}
    programs |= dict.fromkeys(("bin/python3", "bin/pip", "bin/buildkite-agent", ".venv/bin/pip"), IDLE)
    for name, text in {**programs, ".venv/bin/activate": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ci" / "expectations").mkdir(parents=True)
    return tmp_path


def edited(name: str, edits: dict[str, str]) -> str:
    """A template after these edits, each of something that stands in it."""
    text = (ROOT / "ci" / name).read_text(encoding="utf-8")
    for old, new in {**EDITS, **edits}.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run(machine: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{machine / 'bin'}:{os.environ['PATH']}", **variables}
    return subprocess.run(command, cwd=machine, env=environment, capture_output=True, text=True)


def run_steps(machine: Path, commands: list[str], **variables: str) -> str:
    """What the commands print, which all succeed, each in a shell of its own or all in one."""
    finished = run(machine, ["bash", "-eo", "pipefail", "-c", "\n".join(commands)], **variables)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_github_actions(machine: Path) -> None:
    jobs = yaml.safe_load(
        edited("github-actions.yml", {"REQUIRED: FLASH_ATTN FLASHINFER CUDNN": "REQUIRED: TORCH_SDPA"})
    )["jobs"]
    github = {name: str(machine / "told") for name in ("GITHUB_PATH", "GITHUB_STEP_SUMMARY")}
    variables = {"BACKEND": "TORCH_SDPA", "REPORT": "reports/0", "MLA_CONFORMANCE": "mla-conformance", **github}
    for job in ("judge", "gate"):
        for step in jobs[job]["steps"]:
            printed = run_steps(machine, [step["run"]], **variables, **step.get("env", {})) if "run" in step else ""
    assert OPEN.search(printed)
    assert OPEN.search((machine / "told").read_text())


def test_buildkite(machine: Path) -> None:
    judge, gate = yaml.safe_load(
        edited("buildkite.yml", {"--require FLASH_ATTN FLASHINFER CUDNN": "--require TORCH_SDPA"})
    )["steps"]
    for step in (judge, gate):
        # As the agent's upload does it: a name of the matrix for its place, and $ for $$.
        commands = [each.replace("{{matrix}}", "TORCH_SDPA").replace("$$", "$") for each in step["commands"]]
        printed = run_steps(machine, commands, MLA_CONFORMANCE="mla-conformance")
    assert OPEN.search(printed)


def slurm(machine: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (machine / "slurm.sh").write_text(edited("slurm.sh", {"shards=8": "shards=2"}))
    return run(machine, ["bash", "slurm.sh", "TORCH_SDPA"], **variables)


def test_slurm(machine: Path) -> None:
    finished = slurm(machine)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert OPEN.search(finished.stdout)
    assert "shard 2/2 of 2" in next(machine.glob("reports/*/2.log")).read_text()


def test_slurm_with_a_shard_that_died(machine: Path) -> None:
    finished = slurm(machine, DEAD="2")
    assert finished.returncode == 1 and DIED in finished.stdout and "gate" not in finished.stdout


def kubernetes(machine: Path, indices: list[int]) -> subprocess.CompletedProcess[str]:
    """The pods of the indexed job that come to their end, then the one of the gate."""
    edits = {'"8"': '"2"', "FLASH_ATTN": "TORCH_SDPA", "/reports/$RUN": f"{machine}/reports/r1", '"7200"': '"0"'}
    judge, gate = yaml.safe_load_all(edited("kubernetes.yml", edits))
    assert judge["spec"]["completionMode"] == "Indexed"
    for index in indices:
        pod = run_pod(machine, judge, JOB_COMPLETION_INDEX=str(index))
        assert pod.returncode == 0, pod.stdout + pod.stderr
    return run_pod(machine, gate)


def run_pod(machine: Path, job: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    named = {each["name"]: each["value"] for each in container["env"]}
    return run(machine, container["command"] + container["args"], **named, **variables)


def test_kubernetes(machine: Path) -> None:
    gate = kubernetes(machine, [0, 1])
    assert gate.returncode == 0, gate.stdout + gate.stderr
    assert OPEN.search(gate.stdout)


def test_kubernetes_with_a_shard_that_died(machine: Path) -> None:
    gate = kubernetes(machine, [0])
    assert gate.returncode == 1 and DIED in gate.stderr and "gate" not in gate.stdout
