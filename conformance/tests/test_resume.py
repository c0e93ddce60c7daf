"""A run that is told to end, killed or cut short at any point loses no verdict, leaves no process and is resumed."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.engine.journal import JOURNAL_NAME, Journal, JournalEvent, Judgement
from mla_conformance.engine.machine import FORBIDS_PIPES, LANDLOCK
from mla_conformance.judging.record import Status
from mla_conformance.report.json_report import load_report
from mla_conformance.tests.nursery import UNEXPLAINED
from mla_conformance.tests.reports import write_sealed
from mla_conformance.vocabulary.capabilities import Tier, find_capability, write_case

COMMAND = Path(sys.executable).with_name("mla-conformance")
LSE = ["--capability", "lse", "--device", "cpu"]
LISTED = find_capability("lse").select(Tier.FULL)


def verdicts(folder: Path) -> int:
    return sum(isinstance(event, Judgement) for event in Journal(folder / JOURNAL_NAME).events())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["certify", *LSE, "--backend", "EAGER", "-n", "1", "--out", str(folder)]) == 0
    return folder


def test_a_journal_cut_inside_a_verdict_can_be_resumed(undisturbed: Path, tmp_path: Path) -> None:
    lines = (undisturbed / "journal.jsonl").read_text().splitlines()
    *_, too_large, lacking, last = [number for number, line in enumerate(lines) if '"event": "verdict"' in line]
    for number, changes in ((too_large, {"too_large": True}), (lacking, {})):
        event = json.loads(lines[number])
        event["record"] |= {"status": "unavailable", **changes}
        lines[number] = json.dumps(event)
    write_sealed(tmp_path, lines[:last])
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(lines[last][:140])
    assert main(["certify", "--resume", str(tmp_path), "-n1"]) == 0
    found, whole = load_report(tmp_path).records, load_report(undisturbed).records
    assert [record.case for record in found] == [record.case for record in whole]
    kept = json.loads(lines[too_large])["record"]["case"]
    assert [record.case for record in found if record.status is not Status.PASS] == [kept]
    assert verdicts(tmp_path) == verdicts(undisturbed) + 1


@pytest.mark.parametrize(
    "arguments", [["--shard", "1/2", "--capability", "lse"], ["--explore", "2", "--capability", "prepare_combinations"]]
)
def test_a_shard_and_drawn_cases_are_resumed(tmp_path: Path, settled: Any, arguments: list[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ["--device", "cpu", "--tier", "smoke", "--backend", "EAGER", "-n", "1", "--out", str(whole)]
    assert main(["certify", *arguments, *more]) == 0
    cut.mkdir()
    write_sealed(cut, (whole / "journal.jsonl").read_text().splitlines()[:2])
    assert main(["certify", "--resume", str(cut), "-n1"]) == 0
    assert settled(cut / "report.json") == settled(whole / "report.json")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_journal_without_its_seal_is_refused(undisturbed: Path, tmp_path: Path, refused: Any, share: float) -> None:
    whole = (undisturbed / "journal.jsonl").read_bytes()
    kept = whole[: int(len(whole) * share)]
    (tmp_path / "journal.jsonl").write_bytes(kept)
    said = refused("certify", "--resume", tmp_path)
    assert "expected a journal as its run left it, with its seal beside it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert (tmp_path / "journal.jsonl").read_bytes() == kept


STRAY = '{"index": 1, "count": 2, "cases": ["lse:q=[77]"]}'


@pytest.mark.parametrize(
    ("edit", "arguments", "said"),
    [
        (('"status": "pass"', '"status": "perfect"'), [], "expected an event of a run as JSON"),
        (('"event": "plan"', '"event": "resume"'), [], "expected a journal that starts with the plan of a run"),
        (('"format": 4', '"format": 3'), [], "expected plan format 4, got 3"),
        (('"cases": []', '"cases": 5'), [], "malformed plan: Expected `array`, got `int` - at `$.cases`"),
        (('"shard": null', '"shard": {"index": 1}'), [], "malformed plan: Object missing required field"),
        (('"shard": null', f'"shard": {STRAY}'), [], "its journal was changed: the shard has cases that are not"),
        (("", ""), ["--shard", "1/2"], "cannot be combined with --shard"),
        (("", ""), ["--tier", "smoke", "-n1"], "it holds another run; tier: was full, is smoke"),
        (("torch 2", "torch 1"), ["-n1"], "it holds another run; backends: EAGER was torch 1"),
    ],
)
def test_another_run_is_refused(
    undisturbed: Path, tmp_path: Path, refused: Any, edit: tuple[str, str], arguments: list[str], said: str
) -> None:
    write_sealed(tmp_path, (undisturbed / "journal.jsonl").read_text().replace(*edit, 1).splitlines())
    content = (tmp_path / "journal.jsonl").read_bytes()
    assert said in refused("certify", "--resume", tmp_path, *arguments)
    assert (tmp_path / "journal.jsonl").read_bytes() == content and len(list(tmp_path.iterdir())) == 2


FORGES = """
import hashlib, json, os, resource
from pathlib import Path
from mla_conformance.backends.eager import EagerPrefillBackend
JOURNAL, TRIED = Path("out/journal.jsonl").resolve(), Path("tried").resolve()
def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
class Forges(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments, **options):
        result = super().run_prefill_new_tokens(*arguments, **options)
        *_, passed = [line for line in JOURNAL.read_text().splitlines() if '"event"' in line]
        if '"started"' in passed and '"pass"' in JOURNAL.read_text() and not TRIED.exists():
            self.forge(passed)
        return (result[0] * 3, *result[1:]) if TRIED.exists() else result
    def forge(self, last):
        made = [line for line in JOURNAL.read_text().splitlines() if '"pass"' in line][-1]
        forged = json.loads(made) | {"after": hashlib.sha256(last.encode()).hexdigest()}
        forged["record"]["case"] = json.loads(last)["case"]
        line = json.dumps(forged)
        with JOURNAL.open("a") as file:
            file.write(line + "\\n")
        try:
            os.mkfifo(JOURNAL.with_name(f".{JOURNAL.name}-{hashlib.sha256(line.encode()).hexdigest()}"))
            TRIED.write_text("made a pipe")
        except PermissionError as error:
            TRIED.write_text(error.strerror)
        resource.prlimit(parent(parent(os.getppid())), resource.RLIMIT_FSIZE, (1, 1))
"""


def test_no_line_of_a_kernel_is_taken_up(tmp_path: Path, command: Path) -> None:
    """It chains a pass to the last line, cannot make the seal of it, and has the run end, which can write no more."""
    if LANDLOCK < FORBIDS_PIPES:
        pytest.skip("no Landlock here")
    (tmp_path / "kern.py").write_text(FORGES)
    asked = ["--backend=kern.py:Forges", "--capability=lse", "--tier=smoke", "--device=cpu", "-n1"]
    run = partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, UNEXPLAINED: "1"})
    assert run([command, "certify", *asked, "--out=out"]).returncode == 3
    assert (tmp_path / "tried").read_text() == "Permission denied"
    forged = len((tmp_path / "out" / "journal.jsonl").read_text().splitlines())
    resumed = run([command, "certify", "--resume=out", "-n1"])
    assert resumed.returncode == 1
    assert f"left out of its journal: 1 line that the run did not seal: {forged}; " in resumed.stderr
    (backend,) = load_report(tmp_path / "out").backends
    assert (backend.counts.passed, backend.counts.failed) == (2, 2)


HELPED = """
from mla_conformance.backends.eager import EagerPrefillBackend
class Helped(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments, **options):
        from helper_of_a_resumed_run import fix
        return fix(super().run_prefill_new_tokens(*arguments, **options))
"""


def test_a_run_whose_helper_was_swapped_is_refused(here: Path, refused: Callable[..., str]) -> None:
    """The file that is named is the same; the helper is imported by a call, from the current folder."""
    helper = here / "helper_of_a_resumed_run.py"
    helper.write_text("def fix(result): return result\n")
    (here / "kern.py").write_text(HELPED)
    asked = ["--backend=kern.py:Helped", "--capability=lse", "--tier=smoke", "--device=cpu", "-n1", "--out=out"]
    assert main(["certify", *asked]) == 0
    assert {Path(place).name for place in load_report(here / "out").code} == {"kern.py", helper.name}
    lines = (here / "out" / "journal.jsonl").read_text().splitlines()
    loaded = max(number for number, line in enumerate(lines) if '"event": "loaded"' in line)
    write_sealed(here / "out", lines[: loaded + 1])
    helper.write_text("def fix(result): return (result[0] * 3, result[1])\n")
    said = refused("certify", "--resume", "out", "-n1")
    assert f"code that the run had loaded has changed: 1 file, first {helper}. " in said
    assert "start again on one machine" in said and "another run" not in said and not re.search("[0-9a-f]{64}", said)


def test_a_full_disk_costs_nothing_that_was_judged(undisturbed: Path, tmp_path: Path, settled: Any) -> None:
    """On a file system of a few pages, which an unprivileged user may mount in a namespace of his own."""
    small, kept = tmp_path / "small", tmp_path / "kept"
    for folder in (small, kept):
        folder.mkdir()
    command = f"'{COMMAND}' certify {' '.join(LSE)} --backend EAGER -n 1 --out {small}/out"
    judge = f"{{ {command}; s=$?; cp -R {small}/out/.journal* {small}/out/journal.jsonl {kept}; exit $s; }}"
    script = f"mount -t tmpfs -o size=8k none {small} && {judge}"
    namespace = ["unshare", "--user", "--mount", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", small]).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*namespace, "sh", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "cannot write the journal" in done.stderr and "No space left on device" in done.stderr
    assert "make room, then mla-conformance certify --resume" in done.stderr and "NOT RUN" in done.stdout
    assert 0 < verdicts(kept) < len(LISTED)
    assert main(["certify", "--resume", str(kept), "-n1"]) == 0
    assert settled(kept / "report.json") == settled(undisturbed / "report.json")


CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in range(1, 6)]
WAITS = """
import os, pathlib, time
from mla_conformance.backends.eager import EagerPrefillBackend
class Waits(EagerPrefillBackend):
    '''Of another dtype for two tokens; for as many as the file names it tells its process, and waits.'''
    def run_prefill_new_tokens(self, q, *arguments, **options):
        here = pathlib.Path(__file__).with_name("waits")
        if here.exists() and len(q) == int(here.read_text()):
            pathlib.Path(__file__).with_name("told").write_text(str(os.getpid()))
            time.sleep(1000)
        output, lse = super().run_prefill_new_tokens(q, *arguments, **options)
        return output, lse.double() if len(q) == 2 else lse
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "waits.py").write_text(WAITS)
    os.mkfifo(home / "told")
    (home / "cases").mkdir()
    for number, case in enumerate(CASES):
        write_case(home / "cases" / f"{number}.json", Case.parse(case))
    assert main(begin(home, home / "whole")) == 1
    return home


def begin(home: Path, out: Path) -> list[str]:
    backend = f"--backend={home / 'waits.py'}:Waits"
    return ["certify", backend, f"--cases={home / 'cases'}", "--device=cpu", "-n1", f"--out={out}"]


def heed_signals() -> None:
    """Those that a shell ignores for what it starts in the background, or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def waiting(command: Path, home: Path, tokens: int, arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    (home / "waits").write_text(str(tokens))
    reported = os.open(home / "told", os.O_RDONLY | os.O_NONBLOCK)
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_signals}
    process = subprocess.Popen([command, *arguments], **streams)
    assert select.select([reported], [], [], 120)[0], "no worker came to that case"
    worker = os.pidfd_open(int(os.read(reported, 100)))
    (home / "waits").unlink()
    yield process
    assert select.select([worker], [], [], 60)[0], "the worker outlives its run"
    for descriptor in (reported, worker):
        os.close(descriptor)


def test_a_deadline_ends_a_run_with_its_report(home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    clock, append = time.monotonic, Journal.append

    def append_and_wait(journal: Journal, event: JournalEvent) -> None:
        append(journal, event)
        if isinstance(event, Judgement):
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)

    monkeypatch.setattr(Journal, "append", append_and_wait)
    assert main([*begin(home, tmp_path), "--deadline=1h"]) == 3
    printed = capsys.readouterr()
    assert f"ended by the deadline; to continue: mla-conformance certify --resume {tmp_path}" in printed.err
    assert [record.case for record in load_report(tmp_path).records] == [CASES[0]] and "4 NOT RUN" in printed.out
    monkeypatch.undo()
    assert main(["certify", "--resume", str(tmp_path), "-n1"]) == 1
    assert len(load_report(tmp_path).records) == len(CASES)
    assert main([*begin(home, none := tmp_path / "none"), "--deadline=.001s"]) == 3
    assert "ended by the deadline before anything was judged" in capsys.readouterr().err and not none.exists()


def test_a_run_that_was_killed_told_to_end(command: Path, home: Path, settled: Any, tmp_path: Path) -> None:
    arguments, resume = begin(home, tmp_path), f"mla-conformance certify --resume {tmp_path}"
    for program, tokens, number, status in (
        (command, 2, signal.SIGKILL, -signal.SIGKILL),
        (COMMAND, 3, signal.SIGINT, 130),
        (command, 4, signal.SIGHUP, 129),
    ):
        with waiting(program, home, tokens, arguments) as process:
            process.send_signal(number)
            printed, said = process.communicate()
        assert process.returncode == status
        if status > 0:
            assert f"ended by {number.name}; to continue: {resume}" in said
            assert "1 failed" in printed and f"{len(CASES) + 1 - tokens} NOT RUN" in printed
            assert [each.case for each in load_report(tmp_path).records] == CASES[: tokens - 1]
        arguments = ["certify", "--resume", str(tmp_path), "-n1"]
    assert main(arguments) == 1
    assert settled(tmp_path / "report.json") == settled(home / "whole" / "report.json")
