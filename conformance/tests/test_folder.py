"""A run's folder: in use by one run at a time, and what an earlier run wrote is never lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mla_conformance.cli import main
from mla_conformance.engine.folder import RunFolder
from mla_conformance.files.inputs import InputError

CERTIFY = ["certify", "--backend", "EAGER", "--device", "cpu"]
UNFINISHED = '{"event": "plan"}\n{"event": "verdict"}\n'
FINISHED = UNFINISHED + '{"event": "end"}\n'


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a folder as a run leaves it whose journal is given."""

    def make(journal: str) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "journal.jsonl").write_text(journal)
        for name in ("run.log", "report.json", "report.html", "mine.txt"):
            (folder / name).write_text(f"earlier {name}")
        return folder

    return make


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_second_of_two_runs_into_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = RunFolder.claim(tmp_path)
    assert main([*CERTIFY, "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"--out {tmp_path}: another run is writing into it" in printed.err
    first.release()
    RunFolder.claim(tmp_path).release()


@pytest.mark.parametrize("wrong", [["--nonsense"], ["--workers=0"], ["--backend=NOPE"], ["--expectations=/nowhere"]])
def test_a_usage_error_leaves_a_finished_folder_as_it_was(hold: Callable[[str], Path], wrong: list[str]) -> None:
    folder = hold(FINISHED)
    before = contents(folder)
    try:
        status = main([*CERTIFY, "--out", str(folder), *wrong])
    except SystemExit as ended:  # of the parser
        status = int(str(ended.code))
    assert status == 2 and contents(folder) == before and [folder] == list(folder.parent.iterdir())


def test_an_unfinished_run_is_not_run_over(hold: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = hold(UNFINISHED)
    before = contents(folder)
    assert main([*CERTIFY, "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"--resume {folder} continues it, --fresh sets it aside" in said
    assert contents(folder) == before


@pytest.mark.parametrize(("journal", "anew"), [(FINISHED, False), (UNFINISHED, True)], ids=["finished", "--fresh"])
def test_what_an_earlier_run_wrote_is_kept_in_a_folder_beside(
    hold: Callable[[str], Path], journal: str, anew: bool
) -> None:
    folder = hold(journal)
    before = contents(folder)
    run = RunFolder.claim(folder, anew=anew)
    assert contents(folder) == before  # until the new run begins
    run.begin()
    (beside,) = set(folder.parent.iterdir()) - {folder}
    assert beside.name.startswith("run-") and contents(folder) == {"mine.txt": before.pop("mine.txt")}
    assert contents(beside) == before


def test_a_run_without_a_folder_gets_one_that_latest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run = RunFolder.claim(None)
        run.begin()
        assert (tmp_path / "build/mla-conformance/latest").resolve() == run.path
    assert len(list((tmp_path / "build/mla-conformance").iterdir())) == 3


def test_a_folder_in_which_nothing_was_begun_is_given_back(tmp_path: Path) -> None:
    RunFolder.claim(tmp_path / "new").discard()
    assert not (tmp_path / "new").exists()
    RunFolder.claim(tmp_path).discard()
    assert tmp_path.exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match=f"--out {tmp_path / 'file' / below}: expected a writable folder: "):
        RunFolder.claim(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "kept"
