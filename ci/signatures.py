"""Record the signatures that the adapters call, from unpacked packages and without importing them.

``python ci/signatures.py LABEL=FOLDER ... FILE:FUNCTION ...`` prints these packages' part of
``backends/tests/signatures.json``; a folder is the target of ``pip install --no-deps --target FOLDER PACKAGE==VERSION``
(or an unpacked source distribution). Functions that are recorded already need not be named.
"""

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath

RECORDED: dict[str, dict[str, list[list[Any]]]] = json.loads(
    (Path(__file__).parents[1] / "backends" / "tests" / "signatures.json").read_text(encoding="utf-8")
)
"""Package and version to ``FILE:FUNCTION`` to its parameters as [name, kind, has a default]."""


def signatures(folder: Path | ZipPath, functions: Iterable[str]) -> dict[str, list[list[object]]]:
    """Those of ``functions`` (``FILE:FUNCTION``) that an unpacked package or a wheel has, with their parameters."""
    found: dict[str, list[list[object]]] = {}
    for function in functions:
        file, _, name = function.partition(":")
        # A class may have moved to another file from one version to the next.
        if (folder / file).is_file():
            defined = dict(_functions(ast.parse((folder / file).read_text(encoding="utf-8"))))
            found |= {function: _parameters(defined[name])} if name in defined else {}
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.arguments]]:
    """Functions by qualified name, in classes and functions too; of overloads the last, which is the implementation."""
    guarded = [node for block in tree.body if isinstance(block, ast.Try) for node in block.body]
    for node in [*tree.body, *guarded]:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.args
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner.args


def _parameters(arguments: ast.arguments) -> list[list[object]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    listed: list[list[object]] = [
        [argument.arg, "POSITIONAL_OR_KEYWORD", index >= required] for index, argument in enumerate(positional)
    ]
    if arguments.vararg:
        listed.append([arguments.vararg.arg, "VAR_POSITIONAL", False])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        listed.append([argument.arg, "KEYWORD_ONLY", default is not None])
    return listed


def main(arguments: list[str]) -> None:
    packages = [argument.split("=", 1) for argument in arguments if "=" in argument]
    named = [argument for argument in arguments if "=" not in argument]
    functions = list(dict.fromkeys([*(name for entry in RECORDED.values() for name in entry), *named]))
    found = {label: signatures(Path(folder), functions) for label, folder in packages}
    sys.stdout.write(json.dumps(found).replace('{"', '{\n "').replace(']], "', ']],\n "') + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
