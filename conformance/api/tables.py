"""What functions of each role are called with and return, as tables: pages print them, own tensors are held to them.

The form of an operand is that of the interface, where it has the operand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.operands import AT_LEAST, Form, forms_of
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.backends.topk import MLATopKBackend, TopKMetadata

_LENGTHS = Form("B + 1", torch.int32)
_LONGEST = "a number that is at least the longest"
_RANKS = {"dcp_world_size": "a number", "dcp_rank": "a number", "cp_kv_cache_interleave_size": "a number"}


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


def _batch(when_paged: str = "", when_gathered: str = "") -> dict[str, Input]:
    """What calls over a cache, or over gathered keys, are told of their batch."""
    forms = forms_of(MLASparseMetadata)
    found = {
        "seq_lens": Input(forms["seq_lens"], "tokens of each request, its queries included"),
        "cu_seqlens_q": Input(_LENGTHS, "first row of each request, and the end"),
        "max_seqlen_q": Input(None, _LONGEST),
        "max_seqlen_k": Input(None, _LONGEST),
        "block_table": Input(
            forms["block_table"], "blocks of each request; anything after a request's last page", when_paged
        ),
    }
    if when_gathered:
        found["workspace_starts"] = Input(forms["workspace_starts"], "first key of each request", when_gathered)
    return found


_PREFILL = forms_of(MLAPrefillBackend.run_prefill_new_tokens)
_DECODE = {**forms_of(MLADecodeBackend.run_decode), **forms_of(MLACommonDecodeMetadata)}
_SPARSE = forms_of(MLASparseBackend.run_sparse_decode)
_GATHERED = forms_of(MLASparseBackend.run_sparse_prefill)
_INDEX = forms_of(MLAIndexerBackend.run_index_logits)
_TOPK = {**forms_of(MLATopKBackend.run_top_k_per_row), **forms_of(TopKMetadata)}
_ABSORBED = Form(_DECODE["q_pe"].shape.replace("R", "L + R"))
_CACHE, _EXTRA, _FP8 = "see [caches](#caches)", '`extra="auto"`', '`quant="fp8"`'
_SCALE = Input(None, "a number, of the softmax")
_K_SCALE = Input(_DECODE["k_scale"], "given with every layout; use it for `fp8` alone")
_LATENT = {
    "output": "[T, N, L], q's dtype; 0 in rows that see no key",
    "lse": "[N, T], float32, natural logarithm; -inf in rows that see no key",
}
TABLES: Mapping[str, Table] = {
    "prefill": Table(
        {
            "q": Input(_PREFILL["q"], "rope applied"),
            "k": Input(_PREFILL["k"], "rope applied"),
            "v": Input(_PREFILL["v"], ""),
            "cu_seqlens_q": Input(_LENGTHS, "first row of each request, and the end"),
            "cu_seqlens_k": Input(_LENGTHS, "first row of each request, and the end"),
            "max_seqlen_q": Input(None, _LONGEST),
            "max_seqlen_k": Input(None, _LONGEST),
            "scale": _SCALE,
            "causal": Input(
                None, 'whether a query sees no later token, aligned bottom-right; False with `call="context_chunk"`'
            ),
            "out": Input(_PREFILL["out"], "write the result here and return it", f"`out=True`, {_FP8}"),
            "output_scale": Input(_PREFILL["output_scale"], "`out` takes codes of value / scale", _FP8),
        },
        _LATENT | {"output": _LATENT["output"].replace("L", "V")},
    ),
    "decode": Table(
        {
            "q": Input(_ABSORBED, "absorbed and rotated; the last tokens of their request"),
            "kv_cache": Input(_DECODE["kv_cache"], _CACHE),
            **_batch(),
            "scale": _SCALE,
            "causal": Input(None, "True"),
            "kv_lora_rank": Input(None, "L"),
            "kv_cache_dtype": Input(None, f"the layout, {_CACHE}"),
            "k_scale": _K_SCALE,
            **{name: Input(None, f"{what}, SPEC 6.6", "`ranks=2`") for name, what in _RANKS.items()},
            "dcp_tot_seq_lens": Input(_DECODE["dcp_tot_seq_lens"], "tokens on all ranks", "`ranks=2`"),
        },
        _LATENT,
    ),
    "sparse": Table(
        {
            "q": Input(replace(_ABSORBED, shape=_ABSORBED.shape.replace(AT_LEAST, "")), "absorbed and rotated"),
            "topk_indices": Input(_SPARSE["topk_indices"], "the only mask; -1 names no key"),
            "index_space": Input(None, "what the indices count: `slot`, `position` or `rank_local`"),
            "scale": _SCALE,
            "kv_lora_rank": Input(None, "L"),
            **_batch("default call", '`call="sparse_prefill"`'),
            "kv_cache": Input(_SPARSE["kv_cache"], _CACHE, "default call"),
            "kv_cache_dtype": Input(None, f"the layout, {_CACHE}", "default call"),
            "k_scale": replace(_K_SCALE, when="default call"),
            "kv": Input(_GATHERED["kv"], "gathered keys, D = L + R", '`call="sparse_prefill"`'),
            "topk_length": Input(_SPARSE["topk_length"], "indices of each row that count", "`length=True`"),
            "attn_sink": Input(_SPARSE["attn_sink"], "a logit for each head", '`sink="drawn"`'),
            "extra_kv_cache": Input(_SPARSE["extra_kv_cache"], "a second cache", _EXTRA),
            "extra_kv_cache_dtype": Input(None, "its layout", _EXTRA),
            "extra_topk_indices": Input(_SPARSE["extra_topk_indices"], "slots of the second cache", _EXTRA),
            "extra_topk_length": Input(
                _SPARSE["extra_topk_length"], "indices that count", '`extra="fp8_ds_mla", length=True`'
            ),
            **{name: Input(None, f"{what}, SPEC 7.10", "`ranks=2`") for name, what in _RANKS.items()},
        },
        _LATENT,
    ),
    "indexer": Table(
        {
            "q": Input(_INDEX["q"], 'e4m3; bf16 with `cache="auto"`'),
            "weights": Input(_INDEX["weights"], "with the scales of softmax and queries in them"),
            "k": Input(
                None,
                '[blocks, page, D + 4] uint8; [blocks, page, D] bf16 with `cache="auto"`; [S, D] with `gathered=True`',
            ),
            "kv_cache_dtype": Input(None, "`fp8_index` or `auto`"),
            **_batch("default", "`gathered=True`"),
            "k_scale": Input(_INDEX["k_scale"], "of gathered codes", "`gathered=True`"),
            "topk_tokens": Input(None, "K, how many to select", '`call="index_topk"`'),
            "index_space": Input(None, "what the selected numbers count", '`call="index_topk"`'),
        },
        {
            "scores": "[T, `max_seqlen_k`], float32; anything after the last token that a row sees",
            "topk_indices": '[T, `topk_tokens`], int32, with `call="index_topk"`; -1 where a row sees fewer tokens',
        },
    ),
    "top-k": Table(
        {
            "logits": Input(_TOPK["logits"], "float32, float16 or bfloat16"),
            "topk_tokens": Input(None, "K, how many to select"),
            "lengths": Input(_TOPK["lengths"], "columns that each row sees"),
            "row_starts": Input(_TOPK["row_starts"], "first column of each row; by default 0"),
        },
        {"topk_indices": "[T, `topk_tokens`], int32, counted from the row's start; -1 after a row's last"},
    ),
}
"""By role; that of a top-k is for ``assert_close`` alone."""


def table_lines(name: str) -> list[str]:
    """A table as a page shows it; inputs of which the same is said share a row."""
    table, lines = TABLES[name], ["| input | what | when |", "|---|---|---|"]
    for each, same in groupby(table.inputs.items(), lambda item: (item[1].line, item[1].when)):
        names = ", ".join(f"`{name}`" for name, _ in same)
        lines.append(f"| {names} | {each[0]} | {each[1]} |".replace("  |", " |"))
    return lines + [f"| *returns* `{name}` | {what} | |" for name, what in table.returns.items()]
