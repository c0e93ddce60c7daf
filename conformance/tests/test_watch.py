"""A backend's file, judged whenever it is saved."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mla_conformance.cli import main

COMMAND = Path(sys.executable).with_name("mla-conformance")
RIGHT = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Mine(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse * 1.0
"""
HANGING = RIGHT.replace("output, lse =", "open('hangs', 'w'), __import__('time').sleep(1000); output, lse =")
WRONG = RIGHT.replace("1.0", "1.5")
"""Of the same size; all are written within one second: what is cached of the one must not be taken for the other."""


def test_what_is_saved_is_judged_until_somebody_ends_it(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    moments = itertools.count(2 * 10**18, 10**6)

    def save(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.utime(tmp_path / "new", ns=(0, next(moments)))
        (tmp_path / "new").replace(source)

    save(RIGHT)
    options = ["--capability", "lse", "--device", "cpu"]
    watching = subprocess.Popen(
        [COMMAND, "watch", "mine.py:Mine", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        # Who is started in the background inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def reported() -> str:
        assert watching.stdout is not None
        return watching.stdout.readline()

    def saved(text: str) -> str:
        save(text)
        return reported()

    try:
        assert re.fullmatch(r"[\d:]{8} Mine ✔ \d+ passed · 0 failed · .* of its budget · \d:\d\d\n", reported())
        assert re.match(r"[\d:]{8} Mine ✘ \d+ passed · [1-9]\d* failed", saved(WRONG))
        assert re.match(r"wrong: Mine, \d+ cases: the LSE is wrong, ", reported())
        while "replay: " not in (line := reported()):
            assert line.startswith("       ")
        assert line.endswith(" --backend mine.py:Mine\n")
        assert re.match(
            r"[\d:]{8} Mine \? '\S+/mine.py:Mine' does not import: SyntaxError: .*\(mine.py, line 1\)\n",
            saved("def" + RIGHT.lstrip()),
        )
        save(HANGING)
        while not (tmp_path / "hangs").exists():
            time.sleep(0.1)
        assert " Mine ✔ " in saved(RIGHT)  # at once, and nothing of what hung
    finally:
        watching.send_signal(signal.SIGINT)
        printed, complained = watching.communicate(timeout=60)
    assert (watching.returncode, printed, complained) == (130, "", "")


def test_only_a_file_can_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "EAGER"]) == 2
    assert "expected a class in a file, as file.py:Class, got EAGER" in capsys.readouterr().err
