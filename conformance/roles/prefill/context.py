"""The cached context of a chunked case: latents in a paged cache, gathered chunk by chunk and up-projected."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import KEYS, VALUES, Draw, start_loc
from mla_conformance.reference.chunking import PLANNERS, ContextChunk
from mla_conformance.reference.kv_cache import gather_latents, write_latents
from mla_conformance.reference.projections import expand_key, kv_b_proj, up_project
from mla_conformance.roles.prefill.case import PrefillCase

ContextKeys = tuple[torch.Tensor, torch.Tensor]
"""k [S, N, P + R] and v [S, N, V]."""


@dataclass(frozen=True)
class LatentContext:
    """What a layer has before it calls the backend."""

    chunks: tuple[ContextChunk, ...]  # the plan of the context
    chunk_keys: tuple[ContextKeys, ...]  # keys and values of each chunk
    new_tokens: ContextKeys  # keys and values of the new tokens
    block_table: torch.Tensor  # [B, max blocks] int32
    workspace: torch.Tensor  # [workspace tokens, L + R], holding the last chunk's latents


def latent_context(draw: Draw[PrefillCase], dtype: torch.dtype) -> LatentContext:
    """Write random latents into a paged cache with shuffled blocks and poisoned rest, plan, gather and up-project.

    Raises:
        ValueError: the workspace is too small for one page per request with context.
    """
    case, device, generator = draw.case, draw.device, draw.generator
    dims, rank = case.dimensions, case.kv_lora_rank

    def latents(tokens: int) -> ContextKeys:
        return (
            torch.randn(tokens, rank, generator=generator).to(dtype),
            torch.randn(tokens, dims.qk_rope_head_dim, generator=generator).to(dtype),
        )

    def weight(width: int) -> torch.Tensor:
        return (torch.randn(rank, case.heads, width, generator=generator) * rank**-0.5).to(dtype)

    def keys_of(kv_c: torch.Tensor, k_pe: torch.Tensor, starts: Sequence[int]) -> ContextKeys:
        k, v = _up_project(kv_c, k_pe, weights, dims.qk_nope_head_dim)
        return draw.by_request(KEYS, k, starts), draw.by_request(VALUES, v, starts)

    weights = kv_b_proj(weight(dims.qk_nope_head_dim), weight(dims.v_head_dim)).to(device)
    cached, new = latents(sum(case.kv)), latents(sum(case.q))
    cache, block_table = _paged_cache(draw, dtype, cached)
    chunks = PLANNERS[case.planner](case.kv, workspace_tokens=case.workspace, page_size=case.page)
    workspace = poison((case.workspace, rank + dims.qk_rope_head_dim), dtype, device, case.poison)
    chunk_keys = []
    for chunk in chunks:
        gathered = gather_latents(cache, block_table, chunk, kv_lora_rank=rank)
        workspace[: chunk.num_tokens] = torch.cat(gathered, dim=-1)
        chunk_keys.append(keys_of(*gathered, chunk.key_start_loc))
    new_tokens = keys_of(new[0].to(device), new[1].to(device), start_loc(case.q))
    return LatentContext(chunks, tuple(chunk_keys), new_tokens, block_table, workspace)


def _up_project(kv_c: torch.Tensor, k_pe: torch.Tensor, weights: torch.Tensor, nope: int) -> ContextKeys:
    """As the layer does: one projection in the model's dtype, split into k_nope and v."""
    projected = up_project(kv_c.double(), weights.double()).to(kv_c.dtype)
    return expand_key(projected[..., :nope], k_pe), projected[..., nope:]


def _paged_cache(
    draw: Draw[PrefillCase], dtype: torch.dtype, latents: ContextKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache [blocks, page, L + R] and block table [B, max blocks]; every unused byte is poison."""
    case, device = draw.case, draw.device
    pages = [-(-length // case.page) for length in case.kv]
    # Block 0 stands for the null block that engines keep: never handed out, and poisoned here.
    blocks = (torch.randperm(sum(pages), generator=draw.drawing(case.seed)) + 1).split(pages)
    block_table = torch.zeros(len(pages), max(1, max(pages)), dtype=torch.int32)
    for row, ids in zip(block_table, blocks, strict=True):
        row[: len(ids)] = ids
    width = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    cache = poison((sum(pages) + 1, case.page, width), dtype, device, case.poison)
    slots = [
        ids.repeat_interleave(case.page)[:length] * case.page + torch.arange(length) % case.page
        for ids, length in zip(blocks, case.kv, strict=True)
    ]
    kv_c, k_pe = (x.to(device) for x in latents)
    write_latents(cache, kv_c, k_pe, torch.cat(slots).to(device))
    return cache, block_table.to(device)
