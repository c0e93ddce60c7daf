"""The way of one decode case from ``mla-conformance certify`` to the printed text, counted while it is gone.

``python ci/hops.py [--list] [--at-most FUNCTIONS FILES STEPS]`` judges one case file on EAGER with every process of the
run traced, and prints four figures. With ``--list`` it names what it counted, in order of appearance; with
``--at-most`` it exits with 1 where the way is longer.

**Carries.** The case, its id, text or bytes that contain the id, and every value of this project or built-in container
through whose fields or members the case is reached. What says what is asked of the whole run (``RunRequest``) does not
count, nor does a plain list of ids.

**Function.** A function of the package that is handed the case by an argument other than ``self``, either from another
file, or to hand it on: to another such function, to an encoder, or as what it returns. So a helper that only looks at
the case for its own file is none, nor are properties, methods of the language, lambdas and comprehensions. The work on
a case's tensors is aside: of building problems, of the reference, the judge and the backends, and of the HTML page
beside the text, the function that is entered is counted, and nothing below it.

**Representation.** A type that carries the case where one of these functions is handed it or returns it.

**Step.** A function of the package that encodes or decodes what carries the case, by msgspec, JSON or pickle.
"""

import argparse
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
CASE = "decode:heads=3;q=[1,1,1];kv=[40,5,130];page=64;data=needle;lse=0"
"""A case of no list, so that nothing but the run of it carries its id."""
_FOLDER = "MLA_CONFORMANCE_HOPS"
_SITE = f"import sys; sys.path.append({str(ROOT / 'ci')!r}); import hops; hops.trace()\n"
_ASIDE = ("problems/*", "judging/*", "reference/*", "backends/*", "report/html.py")
_ASIDE_OF_ROLES = ("roles/*/problem.py", "roles/*/call.py", "roles/*/judge.py")
_ASKED = "RunRequest"
"""The class of :mod:`mla_conformance.engine.request`; by name, since no process of the run may import it early."""
_MOST_MEMBERS = 1000
_FLAGS = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
_CODECS = ("json.dumps", "json.loads", "msgspec.to_builtins", "msgspec.convert", "msgspec.json.encode",
           "msgspec.json.decode", "pickle.dumps", "pickle.loads")  # fmt: skip


def carries(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether the case is reached from a value."""
    kind = type(value)
    if kind is str:
        return CASE in value
    if kind in (bytes, bytearray):
        return CASE.encode() in value
    if id(value) in seen:
        return False
    return any(carries(member, seen | {id(value)}) for member in _members(value))


def _members(value: Any) -> Iterator[Any]:
    kind = type(value)
    if isinstance(value, dict):
        if len(value) < _MOST_MEMBERS:
            yield from [*value.keys(), *value.values()]
    elif kind in (list, tuple, set, frozenset, deque):
        if len(value) < _MOST_MEMBERS and not all(type(member) is str for member in value):
            yield from list(value)
    elif (kind.__module__ or "").startswith("mla_conformance") and kind.__name__ != _ASKED:
        if any(base.__name__ == "Case" for base in kind.__mro__):
            yield value.id
        names = getattr(kind, "__struct_fields__", None) or list(getattr(value, "__dict__", ()))
        yield from (getattr(value, name, None) for name in names)


class _Tracer:
    """Writes what one process does with the case into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handed: dict[int, tuple[str, str]] = {}
        self._places: dict[CodeType, tuple[str, str]] = {}
        self._told: set[str] = set()

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "return":
            if (where := self._handed.pop(id(frame), None)) and value is not None and carries(value):
                self._tell("hop", *where, type(value).__name__)
        elif event == "call":
            where = self._place(frame.f_code)
            if where[0] and not self._is_aside(frame) and (kind := _handed(frame)):
                self._tell("handed" if self._is_own(frame, where[0]) else "hop", *where, kind)
                self._handed[id(frame)] = where
                self.hands_on(frame.f_back)

    def hands_on(self, frame: FrameType | None) -> None:
        """What hands on is the innermost function that was handed the case."""
        while frame is not None:
            if where := self._handed.get(id(frame)):
                self._tell("hop", *where, "")
                return
            frame = frame.f_back

    def coded(self, frame: FrameType) -> None:
        """A frame called an encoder or decoder."""
        where = _where(frame.f_code)
        if where[0]:
            self._tell("step", *where, "")
            self.hands_on(frame)

    def _place(self, code: CodeType) -> tuple[str, str]:
        if code not in self._places:
            self._places[code] = _where(code) if _is_counted(code) else ("", "")
        return self._places[code]

    def _is_aside(self, frame: FrameType) -> bool:
        outer = frame.f_back
        while outer is not None:
            file, _ = _where(outer.f_code)
            if file and any(fnmatch(file, pattern) for pattern in (*_ASIDE, *_ASIDE_OF_ROLES)):
                return True
            outer = outer.f_back
        return False

    def _is_own(self, frame: FrameType, file: str) -> bool:
        """Whether the nearest function of the package below which a frame runs stands in the same file."""
        outer = frame.f_back
        while outer is not None and not _where(outer.f_code)[0]:
            outer = outer.f_back
        return outer is not None and _where(outer.f_code)[0] == file

    def _tell(self, *words: str) -> None:
        line = "\t".join(words)
        if line not in self._told:
            self._told.add(line)
            with (self._folder / str(os.getpid())).open("a", encoding="utf-8") as file:
                file.write(f"{time.monotonic_ns():020}\t{line}\n")


def _where(code: CodeType) -> tuple[str, str]:
    """File below the package, and function; nothing of what is not the package's."""
    path = code.co_filename
    if not path.startswith(f"{ROOT}/") or not path.endswith(".py") or "/ci/" in path:
        return "", ""
    return path.removeprefix(f"{ROOT}/").removeprefix("conformance/"), code.co_qualname


def _is_counted(code: CodeType) -> bool:
    name = code.co_name
    if name.startswith(("<", "__")) or not _where(code)[0]:
        return False
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    return "property" not in lines[code.co_firstlineno - 1]  # a decorator is the first line of a function


def _handed(frame: FrameType) -> str:
    """The type of the argument by which a function is handed the case; empty if it is not."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in _FLAGS)
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if name not in ("self", "cls") and carries(value):
            return type(value).__name__
    return ""


def trace() -> None:
    """Trace this process and those that it forks."""
    import msgspec

    tracer = _Tracer(Path(os.environ[_FOLDER]))
    modules = {"json": json, "msgspec": msgspec, "msgspec.json": msgspec.json, "pickle": pickle}
    for codec in _CODECS:
        module, _, name = codec.rpartition(".")
        setattr(modules[module], name, _watched(getattr(modules[module], name), tracer))
    threading.setprofile(tracer)
    sys.setprofile(tracer)


def _watched(codec: Callable[..., Any], tracer: _Tracer) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        result = codec(*arguments, **options)
        sys.setprofile(None)
        try:
            if carries(result) or any(map(carries, arguments)):
                tracer.coded(sys._getframe(1))
        finally:
            sys.setprofile(tracer)
        return result

    return called


def _run(folder: Path) -> None:
    """Judge the case, traced, in a folder."""
    from mla_conformance.engine.request import RunRequest

    assert RunRequest.__name__ == _ASKED, "the class was renamed: name it here as well"
    for name in ("site", "cases", "told"):
        (folder / name).mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    write = "from pathlib import Path; from mla_conformance.vocabulary.case_files import Case, write_case; "
    write += f"write_case(Path('cases/one.json'), Case.parse({CASE!r}))"
    subprocess.run([sys.executable, "-c", write], cwd=folder, check=True)
    certify = [sys.executable, "-m", "mla_conformance", "certify", "--backend", "EAGER", "--cases", "cases"]
    traced = {"PYTHONPATH": str(folder / "site"), _FOLDER: str(folder / "told"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*certify, "--device", "cpu", "--workers", "1", "--out", "run"],
        cwd=folder,
        env={**os.environ, **traced},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode or "1 passed" not in done.stdout:
        raise SystemExit(f"expected the case to pass, got exit status {done.returncode}:\n{done.stdout}")


def main() -> int:
    """Count, and say what was counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions and steps, in order of appearance")
    parser.add_argument("--at-most", type=int, nargs=3, metavar=("FUNCTIONS", "FILES", "STEPS"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder))
        parts = (part.read_text(encoding="utf-8").splitlines() for part in (Path(folder) / "told").iterdir())
        reported = [line.split("\t")[1:] for line in sorted(chain.from_iterable(parts))]
    hops = {(file, name) for what, file, name, _ in reported if what == "hop"}
    functions = dict.fromkeys((file, name) for _, file, name, _ in reported if (file, name) in hops)
    steps = dict.fromkeys((file, name) for what, file, name, _ in reported if what == "step")
    kinds = {kind for _, file, name, kind in reported if (file, name) in hops and kind}
    files = {file for file, _ in functions}
    found = (len(functions), len(files), len(steps))
    if options.list:
        for title, places in (("functions", functions), ("steps", steps)):
            print(f"{title}:", *(f"  {file} {name}" for file, name in places), sep="\n")  # noqa: T201
        print("representations:", ", ".join(sorted(kinds)))  # noqa: T201
    print(f"{found[0]} functions, {found[1]} files, {len(kinds)} representations, {found[2]} encode and decode steps")  # noqa: T201
    return int(any(got > most for got, most in zip(found, options.at_most or found, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
