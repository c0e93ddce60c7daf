"""What functions of each role are called with and return, as tables: pages print them, own tensors are held to them.

``tables.toml`` says it in words; the form of an operand is that of the interface, where it has the operand.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.operands import AT_LEAST, Form, forms_of
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.backends.topk import MLATopKBackend, TopKMetadata

_STARTS = {name: Form("B + 1", torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
_DECODE = forms_of(MLADecodeBackend.run_decode)
_ABSORBED = Form(_DECODE["q_pe"].shape.replace("R", "L + R"))
_LISTED = forms_of(MLASparseMetadata)
_FORMS: Mapping[str, Mapping[str, Form]] = {
    "prefill": {**forms_of(MLAPrefillBackend.run_prefill_new_tokens), **_STARTS},
    "decode": {**forms_of(MLACommonDecodeMetadata), **_DECODE, **_STARTS, "q": _ABSORBED},
    "sparse": {
        **_LISTED,
        **forms_of(MLASparseBackend.run_sparse_prefill),
        **forms_of(MLASparseBackend.run_sparse_decode),
        **_STARTS,
        "q": replace(_ABSORBED, shape=_ABSORBED.shape.replace(AT_LEAST, "")),
        "k_scale": _DECODE["k_scale"],
    },
    "indexer": {**_LISTED, **forms_of(MLAIndexerBackend.run_index_logits), **_STARTS},
    "top-k": {**forms_of(TopKMetadata), **forms_of(MLATopKBackend.run_top_k_per_row)},
}
_IN_WORDS = {("indexer", "k")}  # whose form is another one in each call


@dataclass(frozen=True)
class Input:
    """One input of a function: its form if it is a tensor, what it is, and which cases hand it over."""

    form: Form | None
    says: str
    when: str = ""

    @property
    def line(self) -> str:
        """Form and meaning for a page."""
        if self.form is None:
            return self.says
        shape, dtype = f"[{self.form.shape}]" if self.form.shape else "scalar", self.form.dtype
        named = f" {dtype}".replace("torch.", "") if isinstance(dtype, torch.dtype) else ""
        return f"{shape}{named}{self.says and ', '}{self.says}"


@dataclass(frozen=True)
class Table:
    """The inputs of a role's functions by name, and what these return."""

    inputs: Mapping[str, Input]
    returns: Mapping[str, str]


_TOLD = tomllib.loads((files("mla_conformance.api") / "tables.toml").read_text(encoding="utf-8"))
TABLES: dict[str, Table] = {}  # by role; that of a top-k is for ``assert_close`` alone
for _role, _table in _TOLD.items():
    _words = {name: [each] if isinstance(each, str) else each for name, each in _table["inputs"].items()}
    _forms = {name: None if (_role, name) in _IN_WORDS else _FORMS[_role].get(name) for name in _words}
    TABLES[_role] = Table({name: Input(_forms[name], *words) for name, words in _words.items()}, _table["returns"])


def table_lines(name: str) -> list[str]:
    """A table as a page shows it; inputs of which the same is said share a row."""
    table, lines = TABLES[name], ["| input | what | when |", "|---|---|---|"]
    for each, same in groupby(table.inputs.items(), lambda item: (item[1].line, item[1].when)):
        names = ", ".join(f"`{name}`" for name, _ in same)
        lines.append(f"| {names} | {each[0]} | {each[1]} |".replace("  |", " |"))
    return lines + [f"| *returns* `{name}` | {what} | |" for name, what in table.returns.items()]
