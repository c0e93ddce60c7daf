"""Golden results of one's own tensors, in float64, each with the error that a faithful kernel may have (SPEC 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.api import own_forms, own_tensors
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.judging import golden
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.reference import error_budget, indexer

__all__ = ["GoldenIndexScores", "GoldenResult", "decode", "index_scores", "prefill", "sparse"]

_STRICTEST = Declaration()


@dataclass(frozen=True)
class GoldenResult:
    """What is right, and how far from it a kernel may be. Float64, on the device of the inputs."""

    output: torch.Tensor  # [T, N, V]
    lse: torch.Tensor  # [N, T], natural logarithm; -inf where a row sees no key
    budget: torch.Tensor  # [T, N, V], the largest error of an output element
    lse_budget: torch.Tensor  # [N, T], the largest error of the LSE


@dataclass(frozen=True)
class GoldenIndexScores:
    """Scores of an indexer. Float64, on the device of the inputs."""

    scores: torch.Tensor  # [T, longest request], by position in the request; -inf for tokens that a row does not see
    budget: torch.Tensor  # of the same shape, the largest error of a score


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    declaration: Declaration = _STRICTEST,
) -> GoldenResult:
    """Attention of queries to keys, request by request; causal ones are aligned bottom-right (SPEC 1.5).

    The budget is that of a kernel with operands of q's dtype that rounds as declared, by default in the strictest way.
    Without ``cu_seqlens_q`` all is one request; keys and values may have one head, which all share.
    """
    return _result("prefill", **locals())


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | float = 1.0,
    declaration: Declaration = _STRICTEST,
) -> GoldenResult:
    """Attention of absorbed queries to the cached latents of their requests, which end with the queries (SPEC 6.2).

    Without ``cu_seqlens_q`` each request has one query; ``k_scale`` is what code 1.0 of an ``fp8`` cache stands for.
    """
    return _result("decode", **locals())


def sparse(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_indices: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    attn_sink: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | float = 1.0,
    declaration: Declaration = _STRICTEST,
) -> GoldenResult:
    """Attention of each query to the keys that its list names (SPEC 7).

    ``kv`` holds gathered keys [S, 1, width], or a cache [blocks, page, width], whose slots are block · page + offset;
    an index of -1 names none of its rows or slots, and a key that is named twice counts twice.
    """
    given = locals()
    if kv.dtype == torch.uint8 or kv.shape[1] != 1:
        given["kv_cache"] = given.pop("kv")
    return _result("sparse", **given)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    declaration: Declaration = _STRICTEST,
) -> GoldenIndexScores:
    """Σ_h weights · relu(q · k) for the tokens of each query's request up to its own (SPEC 8).

    ``k`` [S, D] is what the keys mean, codes times their scales; requests are told as of a prefill.
    """
    queries = own_forms.starts_of("cu_seqlens_q", cu_seqlens_q, len(q))
    same = cu_seqlens_k is None and len(q) == len(k)
    keys = queries if same else own_forms.starts_of("cu_seqlens_k", cu_seqlens_k, len(k))
    found = indexer.index_scores(q, weights, k, query_start_loc=queries, key_start_loc=keys)
    allowed = roundoffs(output_dtype(q.dtype), declaration.rounding_of(q.dtype), tolerance())
    return GoldenIndexScores(found.scores, found.budget(allowed) * tolerance().element_limit)


def _result(role: str, *, declaration: Declaration, **inputs: Any) -> GoldenResult:
    problem, numbers = own_tensors.own_problem(role, inputs), tolerance()
    (call,) = problem.attention
    operands, rounding = call.operands(), declaration.rounding_of(problem.dtype)
    state = golden.golden_state(problem, golden.JudgedRows(problem.query_start_loc), operands)
    keys, columns, dequantised = max(call.key_lens), operands.q.shape[-1], operands.dequantised
    allowed = roundoffs(problem.output_dtype, rounding, numbers, 0, keys, columns, dequantised=dequantised)
    element = error_budget.element_budget(state, allowed) * numbers.element_limit
    return GoldenResult(state.output, state.lse, element, error_budget.lse_budget(state, allowed) * numbers.lse_limit)
