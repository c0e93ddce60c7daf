"""Kernels of a hub: ``hub:org/name@version``, or ``hub:path/to/repository`` for a folder in the same layout.

A repository holds ``build/<variant>``, as the package `kernels` downloads it, and an adapter, whose class ``Backend``
finds the package as ``self.kernel``. The process that judges imports neither; a version becomes its commit.
"""

import hashlib
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla_conformance.backends import dependencies, roles
from mla_conformance.backends.foreign import HUB, BackendReferenceError, cut, one_line

_KERNELS = dependencies.Library("kernels", "kernels", "pip install 'mla-conformance[hub]'")
_REMOTE = re.compile(r"([\w.-]+/[\w.-]+)@(\w[\w./-]*)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMPILED = re.compile(r"torch(-stable-abi)?(\d)(\d+)(-cxx11)?-(cpu|cu|rocm)(\d*)-(\w+)-(\w+)")
"""A variant that is compiled: for a torch, a device and its version, a CPU and a system."""


def _asked(reference: str) -> tuple[str, str, Path | None]:
    """Org/name or the path of a folder; a version, branch, tag or commit, empty for a folder; the adapter if named."""
    text, adapter = reference.removeprefix(HUB), None
    if text.endswith(".py"):
        text, _, named = text.rpartition(":")
        adapter = Path(os.path.realpath(named))
    if text and os.path.isdir(text):  # noqa: PTH112 - False for what no folder can be called
        return os.path.realpath(text), "", adapter
    if found := _REMOTE.fullmatch(text):
        return found[1], found[2], adapter
    got = "no version" if _REMOTE.fullmatch(f"{text}@1") else "no such folder"
    expected = "expected hub:org/name@version, or hub: and the folder of a repository"
    raise BackendReferenceError(f"'{cut(reference, 200)}': {expected}, got {got}")


def parse(reference: str) -> tuple[str, str]:
    """The name of a kernel, and its reference, with the commit that its version stands for."""
    place, version, adapter = _asked(reference)
    name = Path(place).name
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        expected = "expected a folder whose name is of letters, digits, '.', '_' and '-'"
        raise BackendReferenceError(f"'{cut(reference, 200)}': {expected}, got {name!r}")
    if version and not _COMMIT.fullmatch(version):
        version = _downloaded(place, version).parents[1].name
    return name, f"{HUB}{place}{version and f'@{version}'}" + (f":{adapter}" if adapter else "")


def adapter_of(reference: str) -> Path | None:
    """The file of the adapter; None if it is downloaded along with the kernel."""
    _, version, adapter = _asked(reference)
    return adapter or (None if version else _located(reference, _downloaded)[2])


def required_adapter(reference: str) -> Path:
    """The adapter of a repository that has a build for this torch, which is downloaded first."""
    *_, adapter = _located(reference, _downloaded)
    if adapter.is_file():
        return adapter
    said = f"'{reference}': expected an adapter, class Backend in {adapter}, got no file; write it, or name another"
    raise BackendReferenceError(f"{said} as {HUB}REPOSITORY:FILE.py")


def _located(reference: str, get: Callable[[str, str], Path]) -> tuple[Path, Path, Path]:
    """The build, the file of the package in it, which older ones have in a folder of its own, and the adapter's."""
    place, version, adapter = _asked(reference)
    if version:
        build = get(place, version)
    else:  # what fits best, by the rules of the package `kernels`
        folder, spec = Path(place) / "build", find_spec("torch")
        torch = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
        variants = sorted(path.name for path in folder.glob("*/"))
        fitting = {rank: variant for variant in variants if (rank := _rank(variant, torch))}
        if not fitting:
            wanted = f"a build for torch {torch.get('__version__')} on {platform.machine()}, such as torch-universal"
            got = f"got {cut(', '.join(variants), 400) or 'none'} in {folder}"
            raise BackendReferenceError(f"'{reference}': expected {wanted}, {got}; build it for this torch")
        build = folder / fitting[max(fitting)]
    for path in (build / "__init__.py", *sorted(build.glob("*/__init__.py"))):
        if path.is_file():
            return build, path, adapter or path.parent / "conformance.py"
    raise BackendReferenceError(f"'{reference}': expected a Python package, got no __init__.py in {build}")


def _rank(variant: str, torch: dict[str, Any]) -> tuple[int, ...]:
    """How well a variant fits this torch and machine; empty if it does not."""
    device = "cu" if torch.get("cuda") else "rocm" if torch.get("hip") else "cpu"
    if variant in ("torch-universal", "torch-cuda" if device == "cu" else f"torch-{device}"):
        return (0, variant != "torch-universal")
    if not torch or not (found := _COMPILED.fullmatch(variant)):
        return ()
    stable, major, minor, tagged, *machine = found.groups()
    built, here = (int(major), int(minor)), tuple(map(int, torch["__version__"].split(".")[:2]))
    whole = "".join(str(torch.get("cuda") or torch.get("hip") or "").split(".")[:2])
    # What is built for a CUDA runs with later ones of the same major version.
    older = device == "cu" and machine[1][:-1] == whole[:-1] and machine[1] <= whole
    fits = (built <= here if stable else built == here) and (older or machine[1] == whole)
    if not fits or machine[:1] + machine[2:] != [device, platform.machine(), platform.system().lower()]:
        return ()
    return (2 if stable else 1, *built, not tagged, int(machine[1] or 0))


@cache
def _downloaded(place: str, version: str) -> Path:
    said = f"'{HUB}{place}@{version}'"
    if missing := _KERNELS.missing():
        raise BackendReferenceError(f"{said}: {missing[0]}")
    done = subprocess.run([sys.executable, "-P", "-m", __name__, place, version], capture_output=True, text=True)
    *_, last = "", *(done.stderr if done.returncode else done.stdout).splitlines()
    if done.returncode:
        raise BackendReferenceError(f"{said} cannot be downloaded: {cut(last) or f'exit status {done.returncode}'}")
    if not re.fullmatch(r".*/[0-9a-f]{40}/build/[^/]+", last):
        raise BackendReferenceError(f"{said}: expected the snapshot of a commit, got '{cut(last)}'")
    return Path(last)


def _install(place: str, version: str, local: bool = False) -> Path:
    """The build for this machine. Whoever names a repository trusts it, as with a package that is installed."""
    which = {"version": int(version)} if re.fullmatch(r"\d{1,9}", version) else {"revision": version}
    local = local or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return Path(_KERNELS.load().install_kernel(place, **which, local_files_only=local, trust_remote_code=True))


_installed = cache(partial(_install, local=True))


@cache
def load(reference: str, import_file: Callable[[Path], Any]) -> Any:
    """The class ``Backend`` of the adapter, with the kernel that it drives; both are imported."""
    (place, version, _), (build, package, adapter) = _asked(reference), _located(reference, _installed)
    evidence = {"repository": place, "revision": version} if version else {}
    evidence |= {"build": build.name, "digest": digest(reference)}
    kernel, backend = import_file(package), getattr(import_file(adapter), "Backend", None)
    if not isinstance(backend, type):
        expected = f"expected a class Backend in {adapter}"
        raise BackendReferenceError(f"'{reference}': {expected}, got {type(backend).__name__}")

    def driving(cls: Any, **others: Any) -> Any:  # its own class: one adapter may drive several repositories
        tells: Any = getattr(cls, "kernel_evidence", lambda self: {})
        own = {"kernel": kernel, "kernel_evidence": lambda self: {**tells(self), **evidence}}
        return type(cls)(cls.__name__, (cls,), {**own, **others, "__module__": cls.__module__})

    named_by = {f"{role}_backend": getattr(backend, f"{role}_backend", None) for role in roles.ROLES.values()}
    return driving(backend, **{name: driving(each) for name, each in named_by.items() if isinstance(each, type)})


def digest(reference: str) -> str:
    """SHA-256 of the files of a build, downloaded, and of its adapter, by their names."""
    build, _, adapter = _located(reference, _installed)
    files = {path.relative_to(build).as_posix(): path for path in build.rglob("*") if path.is_file()}
    named = {name: path for name, path in {**files, adapter.name: adapter}.items() if "__pycache__" not in name}
    lines = (f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in sorted(named.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{_install(sys.argv[1], sys.argv[2])}\n")
    except Exception as error:  # of others' code
        sys.exit(one_line(error))
