"""Bounds: what no machine, no reader and no list of cases could take is refused, cut or ended at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla_conformance.backends.foreign import LINE, MESSAGE, AnswerError, one_line, reasons_of
from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cli import main
from mla_conformance.commands.parser import workers
from mla_conformance.files.whole import InputError, read_text, require_writable, write_output
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.tests.unexplained import unexplained
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.case_files import write_case

CPU = torch.device("cpu")
CASE = Case.parse("lse:dims=small;heads=2;q=[3]")
LOUD = """
import os, stat
from mla_conformance.backends.eager import EagerPrefillBackend as E

def say(data, call):
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)
        except OSError:
            pass
    return call()

class Mega(E):
    def run_prefill_new_tokens(self, *a, **k): raise RuntimeError("A" * 30_000_000)
class Endless(E):
    def run_prefill_new_tokens(self, *a, **k): return say(b"[" * 20_000_000, lambda: os.read(os.pipe()[0], 1))
class Stray(E):
    def run_prefill_new_tokens(self, *a, **k): return say(b"{}\\n", lambda: os.read(os.pipe()[0], 1))
class Mute(E):
    def kernel_evidence(self): return {"k" * 9_000_000: "v" * 9_000_000}
"""


def test_a_process_that_says_what_no_kernel_says_is_ended_and_the_next_one_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loud.py").write_text(LOUD)
    Path("cases").mkdir()
    write_case(Path("cases/one.json"), CASE)
    backends = [f"--backend=loud.py:{name}" for name in ("Mega", "Endless", "Stray", "Mute")]
    options = ["--cases=cases", "--device=cpu", "-n1", "--timeout=5", "--out=out", "--give-up-after=1"]
    with unexplained():
        assert main(["certify", *backends, *options]) == 1
    assert Path("out/journal.jsonl").stat().st_size < 2**20
    found = {backend.name: backend.records[0] for backend in load_report(Path("out")).backends}
    assert "RuntimeError: AAAA" in found["Mega"].message and "… and 29,997,952 more " in found["Mega"].message
    assert len(found["Mega"].message) <= MESSAGE and len(found["Mega"].detail) < LINE + 99
    assert (found["Endless"].status, found["Endless"].check) == (Status.FAIL, "call"), found["Endless"]
    assert "malformed reply from the kernel process: expected at most" in found["Endless"].message
    assert found["Stray"].status is Status.TIMEOUT  # too short for a reply, of which the rest is waited for
    assert found["Mute"].status is Status.PASS and sum(map(len, found["Mute"].evidence)) < 2 * MESSAGE
    capsys.readouterr()


def test_texts_of_others_are_cut_where_they_are_taken(tmp_path: Path) -> None:
    long = "x" * 20_000_000
    assert len(one_line(RuntimeError(long))) < MESSAGE and len(one_line(type(long, (Exception,), {})())) < 2 * MESSAGE
    assert [len(reason) < MESSAGE + 99 for reason in reasons_of([long])] == [True]
    with pytest.raises(AnswerError) as refused:
        reasons_of(long)
    assert len(str(refused.value)) < MESSAGE + 200
    (tmp_path / "mega.py").write_text(LOUD)
    record = judge_one(Subject.of(f"{tmp_path / 'mega.py'}:Mega", CPU), CASE, Context())
    assert len(record.message) <= MESSAGE and record.message.endswith("more characters (SPEC 3.8)")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a usage error."""
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    return capsys.readouterr().err


LSE = ["certify", "--backend", "EAGER", "--capability", "lse", "--device", "cpu"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*LSE, "-n", "99999999999999999999"],
        [*LSE, "-n", "+2"],
        [*LSE, "--explore", "1_0"],
        [*LSE, "--timeout", "9" * 300],
        [*LSE, "--deadline", "99999999h"],
        [*LSE, "--shard", "١/٢"],
        ["report", "diff", "a", "b", "--drift", "0_1"],
        ["minimize", "lse:q=[1]", "--backend", "EAGER", "--tries", "1e3"],
    ],
)
def test_a_number_is_in_ascii_and_within_its_limits(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert " expected " in refused(capsys, *arguments) and not list(tmp_path.iterdir())


def test_a_machine_has_a_few_workers_a_core() -> None:
    cores = os.cpu_count() or 1
    assert workers(str(cores)) == cores and workers(str(4 * cores)) == 4 * cores
    with pytest.raises(Exception, match=f"at most {4 * cores:,}, got"):
        workers(str(4 * cores + 1))


def test_a_case_id_has_ascii_digits_and_no_empty_field() -> None:
    digits = ("q=[٤]", "q=[4x٢]", "q=[(1,٢)x8]", "q=[4];heads=٤", "q=[4];heads=1_0", "q=[4];heads=+4", "q=[4];lse=١")
    empty = ("q=[4];;", "q=[4];", ";q=[4]", "q=[4];;heads=2", "q=[4]; ;heads=2", "q=[4];=2", ";", "q=", "q=[4];data")
    for fields in (*digits, *empty, "q=[4];heads=", "q=[4];dims=١-1-1-1"):
        with pytest.raises(CaseError):
            Case.parse(f"lse:{fields}")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "it.py")
    for refuses in (read_text, require_writable, lambda path: write_output(path, "text")):
        with pytest.raises(InputError, match=r"a FIFO, a device or a socket|this is a folder|Is a directory"):
            refuses(path)
    with pytest.raises(BackendReferenceError, match="it is a folder, a FIFO, a device or a socket"):
        parse_reference(f"{path}:Mine")
    assert not path.is_file()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in ("cheats", "defects"):
        assert f"{tmp_path}: expected a file, this is a folder" in refused(capsys, command, "--out", str(tmp_path))
