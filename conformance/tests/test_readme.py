"""The README's example and commands are what it says they are."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = Path(sys.executable).with_name("mla-conformance")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_example_backend_is_certified(tmp_path: Path) -> None:
    (example,) = (block for block in blocks("python") if "class MyBackend" in block)
    (tmp_path / "my_backend.py").write_text(example, encoding="utf-8")
    options = ["--backend", "my_backend.py:MyBackend", "--tier", "smoke", "--device", "cpu", "--out", "out"]
    finished = subprocess.run([COMMAND, "certify", *options], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["backends"]["MyBackend"]["status"] == "pass"
    assert "MyBackend" in finished.stdout


def test_continuous_integration_runs_the_two_commands_as_written() -> None:
    promised = [block.strip() for block in blocks("bash") if block.startswith("pip install -c")]
    executed = re.findall(r'^run "(pip install .* && .*)"$', (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert len(promised) == 2
    assert executed == promised
