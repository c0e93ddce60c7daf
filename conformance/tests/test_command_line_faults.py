"""No command prints a traceback: for no bad value, for nothing that is no such file, and wherever output goes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mla_conformance.commands.parser import Command, Option, command_line
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.engine.request import require_salt
from mla_conformance.engine.supervisor import RunError
from mla_conformance.files.whole import InputError

_FILLED = {"case": "lse:q=[4]", "--backend": "EAGER", "backend": "mine.py:Mine"}
_FILLED |= {"before": "pip==1", "after": "pip==2", "shell": "bash"}
"""What is given where something has to be; paths that are not there are called ``nothing``."""
MINE = "from mla_conformance.backends.eager import EagerPrefillBackend\nclass Mine(EagerPrefillBackend): ...\n"


def options_of(command: Command) -> list[Option]:
    return [option for option in command.options if option.settings.get("action") != "store_true"]


def call(command: Command, option: Option | None = None, value: str = "") -> list[str]:
    arguments = command.words.split()
    for each in options_of(command):
        name = each.names[-1]
        positional = not name.startswith("-")
        if each is not option and not each.settings.get("required") and each.settings.get("nargs") == "?":
            continue
        if each is option or positional or each.settings.get("required"):
            given = value if each is option else _FILLED.get(name, "nothing")
            arguments += [given] if positional else [name, given]
    return arguments


MOST_SECONDS = 20
VALUES = {"empty": "", "endless": "a" * 100_000, "nowhere": "/dev/null/nope"}
VALUES |= {"unprintable": "::error::\x1b[31mred\x07\udcff\udcfe"}
parser = command_line(COMMANDS, GROUPS)
commands = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)


def _folder_of_fifos(path: Path) -> None:
    path.mkdir()
    for name in ("report.json", "record.json", "journal.jsonl", "case.json", "known.toml", "certificate.json"):
        os.mkfifo(path / name)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 * 2**20)


BAD: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "folder-of-fifos": _folder_of_fifos,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "large": _large,
    "truncated": lambda path: path.write_text('{"schema": "mla-conformance-report/5", "cases": ["lse:q'),
    "no-text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "empty": Path.touch,
}

NO_WORK = (
    "defects.report.deciding_digest", "tests.cheats.report.run_cheats", "bump.version.Environment.make",
    "commands.export.reproduced",
)  # fmt: skip
"""What follows once all arguments are read."""


@pytest.fixture(autouse=True)
def quick(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own with a backend, without work, and not for long: who waits for a FIFO waits for ever."""
    instead: dict[str, object] = {
        **{f"commands.{name}.KNOWN_FAILURES": here for name in ("certify", "reports", "verify")},  # which holds none
        **dict.fromkeys(NO_WORK, Mock(side_effect=InputError("no work, in a test"))),
        "engine.run.Run.prepare": Mock(side_effect=RunError("no process, in a test")),
        "commands.listing.tier_lines": list,
        "commands.export._require_survival": lambda *_: None,
        "scoreboard.site.page": lambda board: "",
        "files.whole.MOST_MEBIBYTES": 8,
        "commands.parser.command_line": lambda *_: parser,
    }
    for name, value in instead.items():
        monkeypatch.setattr(f"mla_conformance.{name}", value)
    Path("mine.py").write_text(MINE)
    late = AssertionError(f"no answer within {MOST_SECONDS} s")
    before = signal.signal(signal.SIGALRM, Mock(side_effect=late))
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("value", VALUES)
@commands
def test_a_bad_value_is_told_in_a_short_sentence(command: Command, value: str, ours: Any) -> None:
    for option in options_of(command):
        status, *told = ours(*call(command, option, VALUES[value]))
        kind, is_blank = option.settings.get("type"), not VALUES[value].strip()
        is_checked = "choices" in option.settings or kind not in (None, Path, require_salt)
        is_checked |= is_blank and kind is not require_salt
        assert status in ((2,) if is_checked else (1, 2, 3)), (option.names, told)
        assert "".join(told).replace("\n", "").isprintable(), (option.names, told)
        assert max(map(len, told)) < 2_000 and "Traceback" not in told[1], (option.names, told)
        assert not (is_checked and option.names[-1].startswith("-")) or option.names[-1] in told[1]


@commands
def test_an_option_that_means_nothing_alone_is_refused(command: Command, refused: Any) -> None:
    for option in filter(lambda option: option.only_with, command.options):
        other = str(option.settings.get("default", 0) + 1)
        value = [] if "action" in option.settings else [*option.settings.get("choices", other)][:1]
        told = refused(*call(command), option.names[-1], *value)
        assert told == f"mla-conformance: {option.names[-1]}: expected together with {' or '.join(option.only_with)}\n"


@pytest.mark.parametrize("kind", BAD)
@commands
def test_a_file_that_is_none_is_told_in_a_sentence(command: Command, kind: str, ours: Any) -> None:
    for number, option in enumerate(options_of(command)):
        suffix = {"case": ".json", "backend": ".py:Mine"}.get(option.names[-1].strip("-"), "")
        if option.settings.get("type") is Path or suffix:
            BAD[kind](Path(f"it{number}{suffix}".removesuffix(":Mine")))
            status, *told = ours(*call(command, option, f"it{number}{suffix}"))
            assert status in (0, 1, 2, 3) and "Traceback" not in told[1], (option.names, told)
            assert status == 0 or any(told), option.names


def test_python_without_docstrings_is_told_and_an_empty_salt_is_that_of_the_list(told: Any) -> None:
    line = [sys.executable, "-OO", "-m", "mla_conformance", "backends"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("mla-conformance: expected Python with docstrings;") and done.stderr.count("\n") == 1
    assert "no process, in a test" in told(3, "certify", "--backend", "mine.py:Mine", "--salt", "")
