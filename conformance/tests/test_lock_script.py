"""When ``ci/lock.sh`` compares no locks, and when a list that changed is an error."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "lock.sh"


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a suite, 2026.9, of which the second has another list."""
    monkeypatch.delenv("LOCK_BASE", raising=False)  # which CI may be run with
    for name, text in {"conformance/version.py": '__version__ = "2026.9.0"\n', "ci/lock.py": ""}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "fixtures").mkdir()
    shutil.copy(SCRIPT, tmp_path / "ci")
    git(tmp_path, "init", "--quiet")
    for cases in ("one", "another"):
        (tmp_path / "fixtures" / "suites.json").write_text(json.dumps({"2026.9": {"cases": cases}}))
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", cases)
    return tmp_path


@pytest.mark.parametrize(("recorded", "status"), [(False, 0), (True, 1)])
def test_a_list_may_change_while_no_record_has_another(
    checkout: Path, recorded: bool, status: int
) -> None:
    if recorded:
        (checkout / "fixtures" / "records").mkdir()
        (checkout / "fixtures" / "records" / "2026.9.jsonl").touch()
    done = subprocess.run([checkout / "ci" / "lock.sh"], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == status
    said = "changed after records were made" if recorded else "not compared: the list of suite 2026.9"
    assert said in (done.stderr if recorded else done.stdout)


ROOMS = ("cases", "defects", "driving", "files", "judging", "problems", "roles", "trials", "vocabulary")
DECIDES = ("backends/a.py", "reference/a.py", "fixtures/arrays.json", *(f"conformance/{room}/a.py" for room in ROOMS))


@pytest.mark.parametrize(("changed", "compared"), [("docs/index.md", False), ("conformance/judging/a.py", True)])
def test_locks_are_compared_of_what_decides_alone(checkout: Path, changed: str, compared: bool) -> None:
    for name in DECIDES:
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).touch()
    (checkout / "ci" / "lock.py").write_text("raise SystemExit(7)")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "all that decides")
    (checkout / changed).parent.mkdir(exist_ok=True)
    (checkout / changed).write_text("other")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "other")
    done = subprocess.run([checkout / "ci" / "lock.sh"], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode == 7) is compared, done.stderr
    assert ("nothing that decides a verdict on a CPU differs" in done.stdout) is not compared
