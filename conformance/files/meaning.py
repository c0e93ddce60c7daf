"""What a source says, for digests that notice when it says something else, and only then."""

import ast
import hashlib
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any


def meaning_digest(paths: Iterable[Path], *texts: str) -> str:
    """SHA-256 of what modules and tables of numbers say, in the order of their names and folders, behind some texts.

    Comments, descriptions and layout do not count, nor does the version of Python that reads the code.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr(text).encode())
    for path in sorted(paths, key=lambda path: (path.name, path.parent.name)):
        said = _said(path.read_text(encoding="utf-8"), path.suffix)
        digest.update(f"({path.name!r}, {said})".encode())
    return digest.hexdigest()


@cache
def _said(text: str, suffix: str) -> str:
    """What a source says as one line: kept by its text, since many digests are of the same sources."""
    return repr(meaning(text, suffix))


def meaning(text: str, suffix: str = ".py") -> Any:
    """What a module or a table of numbers says, as plain data: without comments, descriptions and layout."""
    return tomllib.loads(text) if suffix == ".toml" else _plain(ast.parse(text))


def _plain(node: Any) -> Any:
    """A syntax tree as lists; empty fields are left out, since later Pythons have more of them."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_description(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def _is_description(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
