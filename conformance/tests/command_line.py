"""Every command of the table with what it has to be given, and without the work behind it, for tests of its surface."""

import io
import sys
import traceback
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mla_conformance import cli
from mla_conformance.commands.parser import Command, Option
from mla_conformance.commands.table import COMMANDS
from mla_conformance.engine.supervisor import RunError
from mla_conformance.files.whole import InputError

_FILLED = {
    "case": "lse:q=[4]",
    "--backend": "EAGER",
    "backend": "mine.py:Mine",
    "before": "pip==1",
    "after": "pip==2",
    "shell": "bash",
}
"""What is given where something has to be; paths that are not there are called ``nothing``."""
MINE = "from mla_conformance.backends.eager import EagerPrefillBackend\nclass Mine(EagerPrefillBackend): ...\n"
STATUSES = (0, 1, 2, 3)


def options_of(command: Command) -> Iterator[Option]:
    """Its options and arguments that take a value."""
    for option in chain(*command.options):
        if option.settings.get("action") != "store_true":
            yield option


def call(command: Command, option: Option | None = None, value: str = "") -> list[str]:
    """The shortest call of a command, with this value of one of its options."""
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


def outcome(arguments: list[str]) -> int:
    """The exit status of a call."""
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def without_work(patch: pytest.MonkeyPatch) -> None:
    """Everything that follows once all arguments are read is refused."""

    def no_process(*_: object, **__: object) -> NoReturn:
        raise RunError("no process, in a test")

    def no_work(*_: object, **__: object) -> NoReturn:
        raise InputError("no work, in a test")

    for module in ("certify", "reports", "verify"):
        patch.setattr(f"mla_conformance.commands.{module}.KNOWN_FAILURES", Path.cwd())  # which holds none
    patch.setattr("mla_conformance.engine.run.Run.prepare", no_process)
    patch.setattr("mla_conformance.commands.defects.deciding_digest", no_work)
    patch.setattr("mla_conformance.tests.cheats.report.run_cheats", no_work)
    patch.setattr("mla_conformance.bump.version.Environment.make", no_work)
    patch.setattr("mla_conformance.commands.listing.tier_lines", list)
    patch.setattr("mla_conformance.commands.export._require_survival", lambda *_: None)
    patch.setattr("mla_conformance.commands.export.reproduced", no_work)
    patch.setattr("mla_conformance.scoreboard.site.page", lambda board: "")


def run_all(report: str) -> NoReturn:
    """Carry out every command as the console script would; what any of them raises is written into a file."""
    raised = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        without_work(patch)
        for command in COMMANDS:
            for arguments in (call(command), [*command.words.split(), "--help"]):
                try:
                    status: Any = outcome(arguments)
                except BaseException:
                    status = traceback.format_exc()
                if status not in STATUSES:
                    raised.write(f"{arguments}: {status}\n")
    Path(report).write_text(raised.getvalue(), encoding="utf-8")
    cli.leave(0)


if __name__ == "__main__":
    from mla_conformance.__main__ import start

    cli.command = lambda: run_all(sys.argv[1])
    start()
