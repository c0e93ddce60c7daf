"""A library in one exact version, in its own environment, whose Python runs this module to say what it finds there."""

import contextlib
import os
import signal
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import InvalidVersion, Version

from mla_conformance.engine.supervisor import Stopped, heeded
from mla_conformance.files.whole import InputError, decode
from mla_conformance.report.terminal import say


@dataclass(frozen=True)
class Pin:
    requirement: str  # what pip installs
    name: NormalizedName  # of the distribution, in its canonical form
    version: str  # as it was asked for

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @staticmethod
    def parse(text: str) -> "Pin":
        try:
            found = Requirement(text)
        except InvalidRequirement:
            found = Requirement("nothing")
        versions = [each.version for each in found.specifier if each.operator == "==" and "*" not in each.version]
        if len(versions) != 1 or len(found.specifier) != 1 or found.url or found.marker:
            raise InputError(f"expected NAME==VERSION such as flashinfer-python==0.6.13, got {text!r}")
        return Pin(text, canonicalize_name(found.name), versions[0])

    def admits(self, version: str) -> bool:
        """Whether an installed version is the one asked for; a local label such as ``+cu130`` may be left out."""
        try:
            return Requirement(self.requirement).specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:  # what stands in a report for a distribution that is not installed
            return False


def two_versions(before: str, after: str) -> tuple[Pin, Pin]:
    old, new = Pin.parse(before), Pin.parse(after)
    if old.name != new.name:
        raise InputError(f"expected two versions of one library, got {old.name} and {new.name}")
    if old.admits(new.version) or new.admits(old.version):
        raise InputError(f"expected two different versions of {old.name}, got {old.version} and {new.version}")
    return old, new


class Found(msgspec.Struct, frozen=True):
    version: str = ""  # empty if it is not installed
    elsewhere: dict[str, str] = {}  # its modules that an import would take from another place, each with that place


def find(names: Sequence[str]) -> dict[str, Found]:
    found = dict.fromkeys(names, Found())
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            installed, elsewhere = distribution(name), {}
            for file in installed.files or ():
                top, *rest = file.parts
                if rest == ["__init__.py"] or (not rest and file.suffix == ".py"):  # modules and packages at its top
                    module, spec = Path(top).stem, find_spec(Path(top).stem)
                    origin = str(Path(spec.origin).resolve()) if spec and spec.origin else ""
                    if origin != str(Path(str(installed.locate_file(file))).resolve()):
                        elsewhere[module] = origin
            found[name] = Found(installed.version, elsewhere)
    return found


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose packages come first, and behind them those that this process sees."""

    folder: Path
    pin: Pin  # the library and its version

    @staticmethod
    def make(folder: Path, pin: Pin, wheels: Path | None) -> "Environment":
        """A new one in a folder that does not exist; pip looks among ``wheels`` alone, or in its index without any."""
        made = Environment(folder, pin)
        try:
            venv.EnvBuilder(symlinks=True).create(folder)
            if find_spec("pip") is None:
                made.run("ensurepip", "--default-pip", otherwise=f"{folder} gets no pip, ensurepip failed")
            # Its Python looks, behind its own packages, where this one looks, ``.pth`` files included.
            own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
            places = [place for place in (*own, *site.getsitepackages()) if Path(place).is_dir()]
            lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
            (made._packages / "mla-conformance-layer.pth").write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{folder}: no virtual environment can be made: {error}") from error
        options = ["--disable-pip-version-check", "--no-input"]
        options += ["--no-index", "--find-links", str(wheels)] if wheels else []
        made.run("pip", "install", *options, pin.requirement, otherwise=f"{pin} is not installed, pip failed")
        return made

    def run(self, module: str, *arguments: str, otherwise: str = "") -> subprocess.CompletedProcess[str]:
        """Run a module by the environment's Python; a signal that stops this process ends all of it as well.

        Where it has to succeed, ``otherwise`` says what a failure means, and its output is captured.
        """
        command = [str(self.python), "-P", "-m", module, *arguments]
        programs = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])
        reported, running = list[int](), list[int]()

        def send(number: int) -> None:
            for group in running:
                with contextlib.suppress(ProcessLookupError):  # all of it has ended
                    os.killpg(group, number)

        def forward(number: int, _: object) -> None:
            reported.append(number)
            send(number)

        to = subprocess.PIPE if otherwise else None
        with heeded(forward):
            # In a session of its own, or a terminal's Ctrl-C would reach it twice.
            options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "start_new_session": True}
            options["env"] = {**os.environ, "PATH": programs, "VIRTUAL_ENV": str(self.folder)}
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=to, stderr=to, **options) as process:
                running.append(process.pid)
                for number in tuple(reported):  # while it was started
                    send(number)
                printed, said = process.communicate()
            if reported:
                send(signal.SIGKILL)
                raise Stopped(reported[0])
        if otherwise and process.returncode:
            say(*said.strip().splitlines()[-8:], error=True)
            raise InputError(f"{otherwise} with status {process.returncode}")
        return subprocess.CompletedProcess(command, process.returncode, printed, said)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(sorted(canonicalize_name(each.name) for each in distributions(path=[str(self._packages)])))

    def find(self, names: Sequence[str]) -> dict[str, Found]:
        said = f"{self.python} failed to list what it finds"
        asked = self.run("mla_conformance.bump.version", *names, otherwise=said)
        return decode(asked.stdout, dict[str, Found], str(self.python))

    def require_installed(self) -> None:
        found = self.find([self.pin.name])[self.pin.name]
        if not self.pin.admits(found.version):
            raise InputError(f"expected {self.pin} in {self.folder}, got {found.version or 'none'}")
        for module, place in found.elsewhere.items():
            said = f"expected import {module} to take {self.pin} of {self.folder}, got {place or 'nothing'}"
            raise InputError(f"{said}; PYTHONPATH comes before what is installed")

    @property
    def _packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))


if __name__ == "__main__":
    print(msgspec.json.encode(find(sys.argv[1:])).decode())  # noqa: T201 - for the process that asked
