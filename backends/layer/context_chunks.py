"""Cached context of prefills: the chunks that it is cut into, and the ranks' shares."""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.layer.context_parallel import Sharding, local_seq_lens, local_token


class ContextPlan(NamedTuple):
    """C chunks of the contexts of B prefills; chunk i holds the i-th share of every context."""

    cu_seq_lens: Tensor  # [C, B + 1] int32, on the device; which gathered rows are whose
    starts: Tensor  # [C, B] int32, on the device; first token of each request in the chunk
    seq_tot: list[int]  # tokens of each chunk
    max_seq_lens: list[int]  # longest request of each chunk, in tokens
    seq_lens: Tensor  # [C, B] int32, on the host


def plan_context(
    context_lens: Tensor, *, workspace_tokens: int, page_size: int, device: torch.device
) -> ContextPlan | None:
    """Cut contexts into chunks that fit the workspace; the plan of ``reference.chunking``, without a loop.

    Args:
        context_lens: [B] integers, on the host.
        workspace_tokens: tokens that a chunk may hold.
        page_size: tokens of a page; chunks start at pages.
        device: where the kernels read the offsets.

    Returns None if no request has context. Raises ValueError: a workspace below a page for each context.
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


class ContextShares(NamedTuple):
    """The shares of W ranks in the C chunks of the contexts of B prefills.

    A rank's part of a chunk are its own tokens, requests end to end, without gaps between them: it reads nothing
    through the block table but what it holds. Parts are sent as long as the longest; what the others hold behind their
    last token is not looked at.
    """

    cu_seq_lens: Tensor  # [C, B + 1] int32, on the device; which rows of this rank's part are whose
    starts: Tensor  # [C, B] int32, on the device; first of this rank's tokens of each request in the chunk
    rows: list[int]  # length of the longest part of each chunk
    # of each chunk [tokens] int64, on the device; where each of its tokens lies among the parts of all ranks, requests
    # end to end and each in the order of its positions
    order: list[Tensor]


def share_context(plan: ContextPlan, sharding: Sharding, device: torch.device) -> ContextShares | None:
    """The shares in the chunks of ``plan``, which is that of one rank; None where no ranks share.

    Chunks start at pages of whole sequences. A share may start anywhere: vLLM cuts chunks at common multiples of pages
    and turns instead, so that its parts are padded less, and leaves the tokens of a request in the order of the ranks.
    """
    if sharding.world_size == 1:
        return None
    lengths = plan.seq_lens.long()
    first = lengths.cumsum(dim=0) - lengths
    ranks = [sharding._replace(rank=rank) for rank in range(sharding.world_size)]
    starts = torch.stack([local_seq_lens(first, one) for one in ranks])
    held = torch.stack([local_seq_lens(first + lengths, one) for one in ranks]) - starts
    bounds = torch.nn.functional.pad(held.cumsum(dim=-1), (1, 0))
    rows = bounds[..., -1].amax(dim=0).tolist()
    order = []
    for chunk, room in enumerate(rows):
        request = torch.arange(len(lengths[chunk])).repeat_interleave(lengths[chunk])
        skipped = first[chunk] - (lengths[chunk].cumsum(dim=0) - lengths[chunk])
        owner, local = local_token(torch.arange(len(request)) + skipped[request], sharding)
        row = owner * room + bounds[owner, chunk, request] + local - starts[owner, chunk, request]
        order.append(row.to(device))
    own_bounds, own_starts = (x[sharding.rank].to(device, torch.int32) for x in (bounds, starts))
    return ContextShares(own_bounds, own_starts, rows, order)
