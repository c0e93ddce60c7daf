"""The command line on bad input: exit status 2 before anything runs, and a message that lists what exists."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_conformance.cli import main
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report

EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend as E\n"
CERTIFY = ["certify", "--device", "cpu"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must end with the status of a usage error and print nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "NOPE"], "unknown backend 'NOPE'; expected one of EAGER, TORCH_SDPA"),
        (["--capability", "nope"], "unknown capability 'nope'; expected one of new_tokens, lse"),
        (["--tier", "huge"], "unknown tier 'huge'; expected one of smoke, full"),
        (["--device", "tpu"], "unknown device 'tpu'; expected cpu or cuda"),
        (["--workers", "0"], "--workers: expected at least 1, got 0"),
        (["--backend", "no/such/file.py:Mine"], "no file "),
        (["--backend", "no_such_module:Mine"], "'no_such_module:Mine' does not import: ModuleNotFoundError"),
    ],
)
def test_what_does_not_exist(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *CERTIFY, *arguments)


def test_cuda_where_there_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(capsys, "certify", "--device", "cuda")
    assert "sees no CUDA device; use --device cpu" in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "does not import: ModuleNotFoundError: No module named 'no_such_library'"),
        (EAGER + "class Mine(E): run_prefill_context_chunk = None", "class Mine lacks run_prefill_context_chunk"),
        (EAGER + "class Mine(E): declaration = 'exact'", "Mine.declaration must be a Declaration, got str"),
        (EAGER, "no class Mine in "),
    ],
)
def test_a_file_that_holds_no_backend(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    assert said in refused(capsys, *CERTIFY, "--backend", f"{tmp_path / 'mine.py'}:Mine")


def test_two_backends_of_one_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_text(EAGER + "class Mine(E): ...")
    message = refused(capsys, *CERTIFY, *(f"--backend={path}:Mine" for path in paths))
    assert f"two backends named 'Mine': {paths[0]}:Mine and {paths[1]}:Mine" in message


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_out_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    message = refused(capsys, *CERTIFY, "--out", str(tmp_path / "file" / below))
    assert f"--out {tmp_path / 'file' / below}: expected a writable folder: " in message
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nonsense", "malformed case id 'nonsense'"),
        ("nope:q=[1]", "unknown capability 'nope'"),
        ("lse:q=[x]", "field q: expected a list such as [64,0,17] or [1x48], got '[x]'"),
        ("lse:q=[1];data=nope", "unknown data regime 'nope'; expected one of normal, needle"),
        ("chunked_context:q=[1,1];kv=[5,5];workspace=16", "workspace_tokens must be at least 32"),
    ],
)
def test_a_malformed_case_id(capsys: pytest.CaptureFixture[str], case: str, said: str) -> None:
    assert said in refused(capsys, "replay", case, "--backend", "EAGER", "--device", "cpu")


@pytest.mark.parametrize("arguments", [[], ["nope"], ["minimize", "lse:q=[1]"], ["backends", "--nope"]])
def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage: mla-conformance" in capsys.readouterr().err


def test_only_unavailable_backends_cannot_be_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CERTIFY, "--backend", "FLASH_ATTN", "--out", str(tmp_path)]) == 3
    assert "FLASH_ATTN     unavailable: " in capsys.readouterr().out
    assert '"status": "unavailable"' in (tmp_path / "report.json").read_text()


def test_backends_are_listed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--device", "cpu"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["EAGER"].endswith(" available") and lines["TORCH_SDPA"].endswith(" available")
    assert " unavailable: " in lines["TRTLLM_RAGGED"]


def test_capabilities_are_listed_with_their_clauses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capabilities"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lse ")]
    assert "cases · SPEC 1.4 · The LSE is the natural logarithm" in line


def test_help_needs_no_torch() -> None:
    code = "import sys, mla_conformance.cli as c; c._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_undeclared_determinism_is_unsupported_and_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from mla_conformance.backends.declaration import Declaration\n"
        "from mla_conformance.backends.eager import EagerPrefillBackend\n"
        "class Mine(EagerPrefillBackend):\n"
        "    declaration = Declaration(deterministic=False)\n"
    )
    arguments = ["--capability", "determinism", "--device", "cpu", "--tier", "smoke", "-n", "1", "--out", str(tmp_path)]
    assert main(["certify", "--backend", f"{tmp_path / 'mine.py'}:Mine", *arguments]) == 3
    assert "determinism – unsupported" in capsys.readouterr().out
    (mine,) = load_report(tmp_path).backends
    assert {record.status for record in mine.records} == {Status.UNSUPPORTED}
    assert {record.message for record in mine.records} == {"not declared deterministic", "prefill only"}


def test_a_reader_that_has_enough_is_no_traceback() -> None:
    command = Path(sys.executable).with_name("mla-conformance")
    process = subprocess.Popen([command, "capabilities"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
