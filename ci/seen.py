"""What commands print, and how long they take: ``python ci/seen.py NAME ...`` runs and stores it, for pages to show.

``ci/seen/NAME.toml`` holds the command, and the files that it wants in its folder; the rest of it is written here.
Pages take it by ``python ci/pages.py``.
"""

import datetime
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "ci" / "seen"
_PROGRAMS = {"mla-conformance": [sys.executable, "-m", "mla_conformance"], "python": [sys.executable]}
_WIDTH = "80"
_LEFT_OUT = re.compile(r"^… .*\n|^report build/.*\n", flags=re.MULTILINE)


@dataclass(frozen=True)
class Seen:
    """A command, and what came of it the last time.

    Attributes:
        command: as a person types it, in a folder that holds ``files`` and this project's ``docs``.
        on: the machine.
        date: ISO date.
        status: how it ended.
        seconds: of wall time; 0 where they were not taken.
        cpu_seconds: of all its processes; likewise.
        output: what it printed, without how far it was and where the report is.
        files: texts by name.
    """

    command: str
    on: str = ""
    date: str = ""
    status: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    output: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(name: str) -> "Seen":
        """What is stored under a name."""
        return Seen(**tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")))

    def again(self) -> "Seen":
        """The same command, run now and here."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            (Path(folder) / "docs").symlink_to(ROOT / "docs")
            begun, before = time.monotonic(), _cpu_seconds()
            done = self._run(folder)
            seconds, cpu = time.monotonic() - begun, _cpu_seconds() - before
        return replace(
            self,
            on=_machine(self.command),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            status=done.returncode,
            seconds=round(seconds, 1),
            cpu_seconds=round(cpu, 1),
            output=_LEFT_OUT.sub("", done.stdout),
        )

    def _run(self, folder: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = shlex.split(self.command)
        call = [*_PROGRAMS[program], *arguments]
        environment = {**os.environ, "COLUMNS": _WIDTH}
        return subprocess.run(
            call, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def to_toml(self) -> str:
        """The text of its file."""
        plain = {name: value for name, value in vars(self).items() if name not in ("output", "files")}
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in plain.items()]
        lines += [f"output = {_literal(self.output)}"] + ["\n[files]"] * bool(self.files)
        lines += [f'"{name}" = {_literal(text)}' for name, text in self.files.items()]
        return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return f"'''\n{text}'''"


def _cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _machine(command: str) -> str:
    """What the command was run on: a GPU, unless it asks for none or there is none."""
    if torch.cuda.is_available() and "--device cpu" not in command:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return f"{len(names)} {names[0]}, torch {torch.__version__}"
    processor = re.search(
        r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return f"{os.cpu_count()} cores of {processor[1] if processor else 'a CPU'}, torch {torch.__version__}"


def main(names: list[str]) -> None:
    """Run the commands that are stored under these names."""
    for name in names:
        seen = Seen.of(name).again()
        (FOLDER / f"{name}.toml").write_text(seen.to_toml(), encoding="utf-8")
        sys.stdout.write(f"{name}: exit status {seen.status}, {seen.seconds} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
