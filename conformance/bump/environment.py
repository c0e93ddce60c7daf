"""An environment for one version of a library, on top of the one that the harness itself runs in."""

import contextlib
import os
import signal
import site
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name

from mla_conformance.bump.version import Found, Pin
from mla_conformance.engine.supervisor import Stopped, heeded
from mla_conformance.files.whole import InputError, decode
from mla_conformance.report.terminal import say

_LAYER = "mla-conformance-layer.pth"
_SHOWN = 8  # lines that are shown of what a process says that fails


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose packages come first, and behind them those that this process sees.

    What a version needs is therefore taken from here if it fits, torch above all, and is installed beside it otherwise.
    """

    folder: Path  # of the environment
    pin: Pin  # the library and its version

    @staticmethod
    def make(folder: Path, pin: Pin, wheels: Path | None) -> "Environment":
        """A new environment with this version in it, in a folder that does not exist yet.

        What pip needs is looked for among ``wheels`` alone; None is for its package index.
        """
        made = Environment(folder, pin)
        try:
            venv.EnvBuilder(symlinks=True).create(folder)
            if find_spec("pip") is None:
                pip = made.run("ensurepip", "--default-pip", capture=True)
                _require_success(pip, f"{folder} gets no pip, ensurepip failed")
            # Its Python looks, behind its own packages, where this one looks, ``.pth`` files included.
            own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
            places = [place for place in (*own, *site.getsitepackages()) if Path(place).is_dir()]
            lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
            (made._packages / _LAYER).write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{folder}: no virtual environment can be made: {error}") from error
        options = ["--disable-pip-version-check", "--no-input"]
        options += ["--no-index", "--find-links", str(wheels)] if wheels else []
        pip = made.run("pip", "install", *options, pin.requirement, capture=True)
        _require_success(pip, f"{pin} is not installed, pip failed")
        return made

    def run(self, module: str, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a module by the environment's Python, which finds programs as if the environment were activated.

        What it prints is kept or shown. Stopped by a signal, it and whatever is in its process group was sent that as
        well, and nothing of it is left.
        """
        command = [str(self.python), "-P", "-m", module, *arguments]
        programs = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])
        active = {**os.environ, "PATH": programs, "VIRTUAL_ENV": str(self.folder)}
        reported, running = list[int](), list[int]()

        def forward(number: int, _: object) -> None:
            reported.append(number)
            for group in running:
                _signal(group, number)

        to = subprocess.PIPE if capture else None
        with heeded(forward):
            # In a session of its own, or a terminal's Ctrl-C would reach it twice.
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=to,
                encoding="utf-8",
                errors="replace",
                env=active,
                start_new_session=True,
            ) as process:
                running.append(process.pid)
                for number in tuple(reported):  # while it was started
                    _signal(process.pid, number)
                printed, said = process.communicate()
            if reported:
                _signal(process.pid, signal.SIGKILL)
                raise Stopped(reported[0])
        return subprocess.CompletedProcess(command, process.returncode, printed, said)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(sorted(canonicalize_name(each.name) for each in distributions(path=[str(self._packages)])))

    def find(self, names: Sequence[str]) -> dict[str, Found]:
        asked = self.run("mla_conformance.bump.version", *names, capture=True)
        _require_success(asked, f"{self.python} failed to list what it finds")
        return decode(asked.stdout, dict[str, Found], str(self.python))

    def require_installed(self) -> None:
        """Make sure that an import takes the version that was asked for."""
        found = self.find([self.pin.name])[self.pin.name]
        if not self.pin.admits(found.version):
            raise InputError(f"expected {self.pin} in {self.folder}, got {found.version or 'none'}")
        for module, place in found.elsewhere.items():
            raise InputError(
                f"expected import {module} to take {self.pin} of {self.folder}, got {place or 'nothing'}; "
                "PYTHONPATH comes before what is installed"
            )

    @property
    def _packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))


def _require_success(finished: subprocess.CompletedProcess[str], otherwise: str) -> None:
    """Show the end of what a process that failed has to say, and raise what it means."""
    if finished.returncode:
        for line in finished.stderr.strip().splitlines()[-_SHOWN:]:
            say(line, error=True)
        raise InputError(f"{otherwise} with status {finished.returncode}")


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)
