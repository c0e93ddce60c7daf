"""A run that was cut short at any point and resumed gives the report of an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mla_conformance.cases.capabilities import Tier, find_capability
from mla_conformance.cli import main
from mla_conformance.isolation.journal import Journal

COMMAND = Path(sys.executable).with_name("mla-conformance")
LSE = ["--capability", "lse", "--device", "cpu"]
LISTED = find_capability("lse").select(Tier.FULL)

SLOW = """
import time
from mla_conformance.backends.eager import EagerPrefillBackend

class Slow(EagerPrefillBackend):
    def prepare_metadata(self, metadata):
        time.sleep(0.3)
        super().prepare_metadata(metadata)

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse + (lse.shape[1] == 3)
"""


Settled = Callable[[Path], dict[str, Any]]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def verdicts(folder: Path) -> int:
    return sum(event["event"] == "verdict" for event in Journal.inside(folder).events())


def alive(folder: Path) -> set[int]:
    """Processes that the journal names and that still run."""
    named = {event["process"] for event in Journal.inside(folder).events() if event["event"] == "start"}
    return {process for process in named if _state(process) not in ("", "Z")}


def _state(process: int) -> str:
    """The system's letter for it; Z has ended and was not yet taken note of."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run over three cases."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["certify", *LSE, "--tier", "smoke", "--backend", "EAGER", "-n", "1", "--out", str(folder)]) == 0
    return folder


@settings(
    max_examples=4, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
@example(data=None)
def test_a_journal_cut_at_any_byte_can_be_resumed(
    undisturbed: Path, tmp_path: Path, settled: Settled, data: Any
) -> None:
    whole = (undisturbed / "journal.jsonl").read_bytes()
    plan = whole.index(b"\n") + 1
    cut = data.draw(st.integers(plan, len(whole))) if data else plan
    (tmp_path / "journal.jsonl").write_bytes(whole[:cut])
    (tmp_path / "report.json").unlink(missing_ok=True)
    assert main(["certify", "--resume", str(tmp_path)]) == 0
    assert settled(tmp_path / "report.json") == settled(undisturbed / "report.json")
    assert verdicts(tmp_path) == 3


@pytest.mark.parametrize(
    "arguments", [["--shard", "1/2", "--capability", "lse"], ["--explore", "4", "--capability", "new_tokens"]]
)
def test_a_shard_and_drawn_cases_are_resumed(tmp_path: Path, settled: Settled, arguments: list[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ["--device", "cpu", "--tier", "smoke", "--backend", "EAGER", "-n", "1", "--out", str(whole)]
    assert main(["certify", *arguments, *more]) == 0
    cut.mkdir()
    lines = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (3, len(lines) - 1):
        (cut / "journal.jsonl").write_bytes(b"".join(lines[:kept]))
        assert main(["certify", "--resume", str(cut)]) == 0
        assert settled(cut / "report.json") == settled(whole / "report.json")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_journal_without_its_plan_is_refused(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    whole = (undisturbed / "journal.jsonl").read_bytes()
    kept = whole[: int(whole.index(b"\n") * share)]
    (tmp_path / "journal.jsonl").write_bytes(kept)
    assert main(["certify", "--resume", str(tmp_path)]) == 2
    assert "expected a journal that starts with the plan of a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert (tmp_path / "journal.jsonl").read_bytes() == kept


@pytest.mark.parametrize(
    ("edit", "arguments", "said"),
    [
        ((b'"event": "verdict"', b'"event": verdict'), [], "expected an event of a run as JSON"),
        ((b'"status": "pass"', b'"status": "perfect"'), [], "expected an event of a run as JSON"),
        ((b'"format": 1', b'"format": 2'), [], "expected plan format 1, got 2"),
        ((b'"cases": []', b'"cases": 5'), [], "the plan lacks a right value of cases"),
        ((b'"suite": "', b'"suite": "9'), [], "not the run that was interrupted; suite: was 9"),
        ((b'"lse": "3 cases ', b'"lse": "3 cases 0'), [], "capabilities: lse was 3 cases 0"),
        ((b"", b""), ["--tier", "full"], "tier: was smoke, is full"),
        ((b"", b""), ["--backend", "TORCH_SDPA"], "backends: EAGER was torch "),
        ((b"", b""), ["-x"], "arguments: was [], is ['-x']"),
        ((b"", b""), ["--out", "elsewhere"], "writes into that folder"),
        ((b"", b""), ["--shard", "1/2"], "leave --shard away"),
        ((b'"shard": null', b'"shard": {"index": 1}'), [], "the plan lacks a right value of shard"),
        (
            (b'"shard": null', b'"shard": {"index": 1, "count": 2, "cases": ["lse:q=[77]"]}'),
            [],
            "holds cases that its list does not",
        ),
    ],
)
def test_another_run_is_refused(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    edit: tuple[bytes, bytes], arguments: list[str], said: str,
) -> None:  # fmt: skip
    content = (undisturbed / "journal.jsonl").read_bytes().replace(*edit, 1)
    (tmp_path / "journal.jsonl").write_bytes(content)
    assert main(["certify", "--resume", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "journal.jsonl").read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_a_backend_that_was_changed_meanwhile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "from mla_conformance.backends.eager import EagerPrefillBackend\nclass Mine(EagerPrefillBackend): ...\n"
    )
    arguments = ["--capability", "lse", "--device", "cpu", "--tier", "smoke", "-n", "1", "--out", str(tmp_path)]
    assert main(["certify", *arguments, "--backend", f"{source}:Mine", "-k", "nothing_of_that_name"]) == 3
    source.write_text(source.read_text() + "# changed\n")
    assert main(["certify", "--resume", str(tmp_path)]) == 2
    assert f"backends: {source}:Mine was file " in capsys.readouterr().err


def test_ctrl_c_then_a_killed_controller_then_the_end(tmp_path: Path, settled: Settled) -> None:
    source = tmp_path / "slow.py"
    source.write_text(SLOW)
    out, whole = tmp_path / "out", tmp_path / "whole"
    begin = [*LSE, "--tier", "full", "--backend", f"{source}:Slow", "-n", "1"]

    process = subprocess.Popen([COMMAND, "certify", *begin, "--out", out], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: verdicts(out) >= 2)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and process.stderr
    assert f"interrupted; to go on: mla-conformance certify --resume {out}" in process.stderr.read()
    judged = verdicts(out)
    partial = report_of(out)["backends"]["Slow"]["capabilities"]["lse"]
    assert 2 <= judged == len(LISTED) - partial["not_run"] < len(LISTED)
    wait_for(lambda: not alive(out), 10)

    resumed = subprocess.Popen([COMMAND, "certify", "--resume", out])
    wait_for(lambda: verdicts(out) >= judged + 2)
    resumed.kill()
    resumed.wait()
    wait_for(lambda: not alive(out), 10)
    assert verdicts(out) < len(LISTED)

    assert main(["certify", "--resume", str(out)]) == 1
    assert main(["certify", *begin, "--out", str(whole)]) == 1
    assert settled(out / "report.json") == settled(whole / "report.json")
    assert verdicts(out) == len(LISTED)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Arguments of a run that takes its time and has failures, and the folder of an undisturbed one."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.py").write_text(SLOW)
    begin = [*LSE, "--backend", f"{folder / 'slow.py'}:Slow", "-n", "1"]
    assert main(["certify", *begin, "--out", str(folder / "whole")]) == 1
    return begin, folder / "whole"


def children_of(process: int) -> list[int]:
    """The process that runs pytest for a controller, if it has not ended."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def kill(process: "subprocess.Popen[bytes]", victim: str) -> None:
    if victim == "controller":
        process.kill()
    elif victim == "pytest":
        for child in children_of(process.pid):
            os.kill(child, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
    process.wait()


KILLS = st.lists(
    st.tuples(st.integers(0, len(LISTED) - 1), st.floats(0, 0.6), st.sampled_from(["controller", "pytest", "Ctrl-C"])),
    min_size=1,
    max_size=2,
)


@settings(
    max_examples=5, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(kills=KILLS)
def test_a_run_killed_at_any_moment_and_resumed_gives_the_undisturbed_report(
    slow: tuple[list[str], Path], settled: Settled, tmp_path_factory: pytest.TempPathFactory, kills: Any
) -> None:
    begin, whole = slow
    out = tmp_path_factory.mktemp("killed")
    command = ["certify", *begin, "--out", str(out)]
    for after, seconds, victim in sorted(kills):
        process = subprocess.Popen([COMMAND, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: verdicts(out) >= after and Journal.inside(out).path.exists())  # noqa: B023 - waited for here
        time.sleep(seconds)
        kill(process, victim)
        wait_for(lambda: not alive(out), 10)
        command = ["certify", "--resume", str(out)]
    assert main(command) == 1
    assert settled(out / "report.json") == settled(whole / "report.json")
    assert verdicts(out) == len(LISTED)


def test_a_full_disk_costs_nothing_that_was_judged(tmp_path: Path, settled: Settled) -> None:
    """On a file system of a few pages, which an unprivileged user may mount in a namespace of his own."""
    small, kept, whole = tmp_path / "small", tmp_path / "kept", tmp_path / "whole"
    for folder in (small, kept):
        folder.mkdir()
    command = f"'{COMMAND}' certify {' '.join(LSE)} --backend EAGER -n 1 --out {small}"
    script = (
        f"mount -t tmpfs -o size=8k none {small} && {{ {command}; s=$?; cp {small}/journal.jsonl {kept}; exit $s; }}"
    )
    namespace = ["unshare", "--user", "--mount", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", small]).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*namespace, "sh", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "cannot write the journal" in done.stderr and "No space left on device" in done.stderr
    assert "make room, then mla-conformance certify --resume" in done.stderr and "NOT RUN" in done.stdout
    assert 0 < verdicts(kept) < len(LISTED)
    assert main(["certify", "--resume", str(kept)]) == 0
    assert main(["certify", *LSE, "--backend", "EAGER", "-n", "1", "--out", str(whole)]) == 0
    assert settled(kept / "report.json") == settled(whole / "report.json")
