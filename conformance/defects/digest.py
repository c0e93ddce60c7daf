"""A digest of everything that decides who is killed: a stored run is that of this code while the digest is the same."""

import ast
import hashlib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.defects.known import FAMILIES
from mla_conformance.judging.sources import judging_sources

_HONEST = ("e8m0", "honest", "honest_decode", "honest_layer", "honest_sparse", "layered", "split_keys", "eager_layer")
_EMULATION = ("eager", "eager_decode", "eager_sparse", "latent_entries", "online_softmax")
"""The kernels that the known defects are made from."""


def deciding_digest() -> str:
    """Digest of the cases, the judge, the suite's procedures, the data and the defects.

    Comments, descriptions and layout do not count, nor does the version of Python that reads the code.
    """
    digest = hashlib.sha256()
    for capability in CAPABILITIES.values():
        digest.update("\n".join(case.id for case in capability.cases).encode())
    for source in sorted(_sources(), key=lambda source: source.name):
        digest.update(repr(meaning(source.read_text(encoding="utf-8"), source.suffix)).encode())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    defects, backends, reference = (
        Path(str(files(f"mla_conformance.{name}"))) for name in ("defects", "backends", "reference")
    )
    return [
        *judging_sources(),
        *(defects / f"{name}.py" for name in (*FAMILIES, *_HONEST)),
        *(backends / f"{name}.py" for name in _EMULATION),
        reference / "error_budget.py",
    ]


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
