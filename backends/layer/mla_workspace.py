"""The workspace into which a layer gathers cached context, and how contexts are cut to fit it."""

from typing import Any, NamedTuple

import torch

MAX_WORKSPACE_TOKENS = 128 * 1024
"""However long the sequences; its up-projection is many times larger than the workspace itself."""


class ContextPlan(NamedTuple):
    """C chunks of the contexts of B prefills; chunk i holds the i-th share of every context.

    Attributes:
        cu_seq_lens: [C, B + 1] int32, on the device; which gathered rows are whose.
        starts: [C, B] int32, on the device; first token of each request in the chunk.
        seq_tot: tokens of each chunk.
        max_seq_lens: longest request of each chunk, in tokens.
        seq_lens: [C, B] int32, on the host.
    """

    cu_seq_lens: torch.Tensor
    starts: torch.Tensor
    seq_tot: list[int]
    max_seq_lens: list[int]
    seq_lens: torch.Tensor


def workspace_tokens(config: Any) -> int:
    """Tokens of the workspace: eight longest sequences or four pages a request, and no more than 128 Ki tokens.

    Args:
        config: read are ``model_config.max_model_len``, ``scheduler_config.max_num_seqs`` and
            ``cache_config.block_size``.

    Raises:
        ValueError: less than a page for each request that may be in a batch.
    """
    pages = config.scheduler_config.max_num_seqs * config.cache_config.block_size
    tokens: int = min(max(8 * config.model_config.max_model_len, 4 * pages), MAX_WORKSPACE_TOKENS)
    if tokens < pages:
        raise ValueError(
            f"expected a context workspace of at least a page for each request, {config.scheduler_config.max_num_seqs} "
            f"requests x {config.cache_config.block_size} tokens, got {tokens} tokens; lower max_num_seqs"
        )
    return tokens


def plan_context(
    context_lens: torch.Tensor, *, workspace_tokens: int, page_size: int, device: torch.device
) -> ContextPlan | None:
    """Cut contexts into chunks that fit the workspace; the plan of ``reference.chunking``, without a loop.

    Args:
        context_lens: [B] integers, on the host.
        workspace_tokens: tokens that a chunk may hold.
        page_size: tokens of a page; chunks start at pages.
        device: where the kernels read the offsets.

    Returns:
        None if no request has context.

    Raises:
        ValueError: a workspace below a page for each context.
    """
    with_context = int((context_lens > 0).sum())
    if not with_context:
        return None
    share = workspace_tokens // with_context // page_size * page_size
    if share < 1:
        raise ValueError(
            f"expected a workspace of at least {with_context * page_size} tokens, a page of {page_size} for each of "
            f"{with_context} contexts, got {workspace_tokens}; enlarge it or prefill fewer requests at once"
        )
    first = torch.arange(0, int(context_lens.max()), share, dtype=torch.int64).unsqueeze(1)
    lengths = (context_lens.long() - first).clamp(min=0, max=share)
    bounds = torch.nn.functional.pad(lengths.cumsum(dim=1), (1, 0))
    return ContextPlan(
        cu_seq_lens=bounds.to(device, torch.int32),
        starts=first.expand_as(lengths).to(device, torch.int32),
        seq_tot=bounds[:, -1].tolist(),
        max_seq_lens=lengths.amax(dim=1).tolist(),
        seq_lens=lengths.to(torch.int32),
    )
