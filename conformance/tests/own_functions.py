"""Functions as an author writes them: a decode that may make one of nine mistakes, and classes as functions."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mla_conformance.api.function_case import FunctionCase, unusual, why_no_function
from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.metadata import ChunkedContextMetadata, MLACommonPrefillMetadata
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.roles.definition import KERNEL_SIZES, facts_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES

Function = Callable[..., Any]
Inputs = dict[str, Any]
Pair = tuple[Tensor, Tensor]
_TILE = 16


def lightest(role: str, wanted: Inputs, count: int = 1) -> list[FunctionCase]:
    """The listed cases of least work that have these values, and otherwise what every kernel supports."""
    cases = [case for entry in CAPABILITIES.values() for case in entry.cases if case.role == role]
    cases = [case for case in cases if all(getattr(case, name, None) == value for name, value in wanted.items())]
    fitting = [each for each in cases if not (unusual(each, wanted) or why_no_function(each))]
    return [FunctionCase(case) for case in sorted(fitting, key=work_of)[:count]]


def decode_with(mistake: str) -> Function:
    """A decode in tiles of 16 keys and heads, merged from two halves; right without a mistake."""
    plan: list[int] = []

    def decode(q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, **x: Any) -> Pair:
        kv_lora_rank, starts = x["kv_lora_rank"], x["cu_seqlens_q"].tolist()
        if mistake != "stale plan" or len(plan) != len(seq_lens):
            plan[:] = seq_lens.tolist()
        scale = q.shape[-1] ** -0.5 if mistake == "wrong scale" else scale
        written = q.shape[1] // _TILE * _TILE if mistake == "last head tile" else q.shape[1]
        # What is not written holds what poisoned memory does, which a CPU's allocator need not hand out again.
        output = q.new_full((*q.shape[:2], kv_lora_rank), torch.nan)
        lse = q.new_empty(*q.shape[1::-1], dtype=torch.float32)
        for request, (rows, blocks) in enumerate(zip(pairwise(starts), block_table, strict=True)):
            k, v = _keys(kv_cache, blocks, plan[request], mistake, **x)
            out, state = _attend(q[slice(*rows)].float(), k, v, scale, mistake)
            output[slice(*rows), :written] = out.to(q.dtype)[:, :written]
            lse[:, slice(*rows)] = state
        return output, lse * math.log2(math.e) if mistake == "base-2 LSE" else lse

    return decode


def _keys(cache: Tensor, blocks: Tensor, length: int, mistake: str, kv_lora_rank: int, **x: Any) -> Pair:
    """[S, L + R] and [S, L] float32 of a request."""
    token = torch.arange(length)
    rows = cache.view(torch.uint8)[blocks[token // cache.shape[1]].long(), token % cache.shape[1]]
    k = rows.view(cache.dtype).float()
    if x["kv_cache_dtype"] == "fp8":
        k[:, : kv_lora_rank if mistake == "k_scale off the rope part" else None] *= x["k_scale"]
    packed = k.flatten()[: length * kv_lora_rank].view(length, kv_lora_rank)
    return k, packed if mistake == "V read as packed" else k[:, :kv_lora_rank]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mistake: str) -> Pair:
    """Output [T, N, L] and LSE [N, T] of queries [T, N, L + R] at the end of the keys."""
    last = len(k) - len(q) + torch.arange(len(q)) if mistake != "no causal mask" else torch.full((len(q),), len(k))
    scores = torch.einsum("tnd,sd->tns", q, k) * scale
    scores = scores.masked_fill(torch.arange(len(k)) > last[:, None, None], -torch.inf)
    half = max(_TILE, len(k) // 2)
    states = [_half(scores[..., part], v[part], mistake) for part in (slice(0, half), slice(half, None))]
    power = torch.exp2 if mistake == "exp2 in the merge" else torch.exp
    most = torch.stack([lse for _, lse in states]).amax(dim=0)
    shift = most.masked_fill(most == -torch.inf, 0.0)
    weights = [power(lse - shift) for _, lse in states]
    total = torch.stack(weights).sum(dim=0)
    output = sum(weight * part for weight, (part, _) in zip(weights, states, strict=True))
    lse = shift + torch.stack([(lse - shift).exp() for _, lse in states]).sum(dim=0).log()
    return (output / total.where(total > 0, 1.0)), lse[..., 0].mT


def _half(scores: Tensor, v: Tensor, mistake: str) -> Pair:
    """Normalised output and LSE [T, N, 1] of some keys, by an online softmax."""
    most = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    total, output = torch.zeros_like(most), scores.new_zeros(*scores.shape[:2], v.shape[1])
    for tile, values in zip(scores.split(_TILE, dim=-1), v.split(_TILE), strict=True):
        before, most = most, torch.maximum(most, tile.amax(dim=-1, keepdim=True) if tile.numel() else most)
        shift = most.masked_fill(most == -torch.inf, 0.0)
        p, grown = (tile - shift).exp(), (before - shift).exp()
        total = total * grown + p.sum(dim=-1, keepdim=True)
        output = output * (1.0 if mistake == "accumulator not rescaled" else grown) + p @ values
    return output / total.where(total > 0, 1.0), most + total.log()


def as_function(kernel: Any, case: Case) -> Function:
    """A function that does what a prefill's or a decode's class does for a case, with an instance for each call."""
    return lambda **x: _CALLS[case.role](kernel, case, x)


def _instance(kernel: Any, case: Case, x: Inputs, **further: Any) -> Any:
    told = facts_of(case, x["q"].dtype)
    sizes = {name: told[name] for name in KERNEL_SIZES} | {"num_heads": x["q"].shape[1], "scale": x["scale"]}
    return kernel(**sizes, **further, vllm_config=None)


def _decode(kernel: Any, case: Case, x: Inputs) -> Any:
    made, rank, starts = _instance(kernel, case, x, **_some(x, "kv_cache_dtype")), x["kv_lora_rank"], x["cu_seqlens_q"]
    lengths = (x["max_seqlen_q"], x["max_seqlen_k"], starts.diff(), x["seq_lens"])
    ranks = _some(x, *(name for name in x if "dcp" in name or name.startswith("cp_")))
    made.prepare_metadata(MLACommonDecodeMetadata(x["block_table"], x["seq_lens"], starts, *lengths, **ranks))
    return made.run_decode(x["q"][..., :rank], x["q"][..., rank:], x["kv_cache"], x["k_scale"])


def _prefill(kernel: Any, case: Case, x: Inputs) -> Any:
    made, starts, keys = _instance(kernel, case, x), x["cu_seqlens_q"], x["cu_seqlens_k"]
    operands = [x[name] for name in ("q", "k", "v")]
    plan = (keys[None], keys[None, :-1] * 0, [int(keys[-1])], [x["max_seqlen_k"]], keys.diff()[None], x["q"][:1, 0])
    chunk = None if x["causal"] else ChunkedContextMetadata(*plan)
    dtypes, blocks = (x["q"].dtype, x["q"].dtype), torch.zeros(len(starts) - 1, 1, dtype=torch.int32)
    made.prepare_metadata(MLACommonPrefillMetadata(blocks, starts, x["max_seqlen_q"], chunk, *dtypes, starts.diff()))
    if chunk:
        return made.run_prefill_context_chunk(0, *operands)
    return made.run_prefill_new_tokens(*operands, return_softmax_lse=True, **_some(x, "out", "output_scale"))


def _some(x: Inputs, *names: str) -> dict[str, Any]:
    return {name: x[name] for name in names if name in x}


_CALLS: dict[Role, Callable[..., Any]] = {Role.PREFILL: _prefill, Role.DECODE: _decode}
