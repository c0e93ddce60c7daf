"""Signatures that the adapters call, read from packages that are not imported.

``python ci/signatures.py`` compares the recorded ones with those of the real packages, fetched as wheels: a line for
each, and 1 if a signature differs. A package that cannot be fetched here, for want of a wheel or an index, is named
with the reason and decides nothing. ``python ci/signatures.py LABEL=FOLDER ... FILE:FUNCTION ...`` prints these
packages' part of ``backends/tests/signatures.json``; a folder is the target of ``pip install --no-deps --target FOLDER
PACKAGE==VERSION`` (or an unpacked source distribution). Functions that are recorded already need not be named.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath

RECORDED: dict[str, dict[str, list[list[Any]]]] = json.loads(
    (Path(__file__).parents[1] / "backends" / "tests" / "signatures.json").read_text(encoding="utf-8")
)
"""Package and version to ``FILE:FUNCTION`` to its parameters as [name, kind, has a default]."""
_FETCH = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12")
_SECONDS = 120
_AT_ONCE = 4
_LARGE = ("lmdeploy", "sglang-kernel", "tensorrt-llm", "vllm")
"""Packages whose wheels have hundreds of megabytes; read an unpacked one, or a checkout of the commit of the label."""


def signatures(folder: Path | ZipPath, functions: Iterable[str]) -> dict[str, list[list[object]]]:
    """Those of ``functions`` (``FILE:FUNCTION``) that an unpacked package or a wheel has, with their parameters."""
    found: dict[str, list[list[object]]] = {}
    for function in functions:
        file, _, name = function.partition(":")
        # A class may have moved to another file from one version to the next.
        if not (folder / file).is_file():
            continue
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        guarded = [node for block in tree.body if isinstance(block, ast.Try) for node in block.body]
        defined: dict[str, ast.arguments] = {}  # by qualified name; of overloads the last, the implementation
        for node in [*tree.body, *guarded]:
            if isinstance(node, ast.FunctionDef):
                defined[node.name] = node.args
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                defined |= {f"{node.name}.{each.name}": each.args for each in inner}
        if name in defined:
            found[function] = _parameters(defined[name])
    return found


def _parameters(arguments: ast.arguments) -> list[list[object]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    listed: list[list[object]] = [[x.arg, "POSITIONAL_OR_KEYWORD", n >= required] for n, x in enumerate(positional)]
    listed += [[arguments.vararg.arg, "VAR_POSITIONAL", False]] if arguments.vararg else []
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [*listed, *([x.arg, "KEYWORD_ONLY", default is not None] for x, default in keywords)]


def compare(label: str, expected: dict[str, list[list[object]]]) -> tuple[str, bool]:
    """One line about the package ``NAME VERSION``, and whether a signature differs."""
    if label.split()[0] in _LARGE:
        return "not compared: its wheel is too large to fetch for this", False
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *_FETCH, "--dest", folder, label.replace(" ", "==")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not compared: no answer from the index in {_SECONDS} s", False
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return f"not compared: {(errors or ['pip failed'])[-1]}", False
        (wheel,) = Path(folder).iterdir()
        found = signatures(ZipPath(wheel), expected)
    different = sorted(name for name in expected if found.get(name) != expected[name])
    if different:
        return f"DIFFERENT: {', '.join(different)}", True
    return f"{len(expected)} signatures as recorded", False


def main(arguments: list[str]) -> int:
    if not arguments:
        with ThreadPoolExecutor(_AT_ONCE) as fetching:
            outcomes = list(fetching.map(compare, RECORDED, RECORDED.values()))
        sys.stdout.writelines(f"{label}: {line}\n" for label, (line, _) in zip(RECORDED, outcomes, strict=True))
        return int(any(differs for _, differs in outcomes))
    packages = [argument.split("=", 1) for argument in arguments if "=" in argument]
    named = [argument for argument in arguments if "=" not in argument]
    functions = list(dict.fromkeys([*(name for entry in RECORDED.values() for name in entry), *named]))
    found = {label: signatures(Path(folder), functions) for label, folder in packages}
    sys.stdout.write(json.dumps(found).replace('{"', '{\n "').replace(']], "', ']],\n "') + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
