"""How chunks of cached context are put together from the parts that ranks hold."""

from typing import NamedTuple

import torch

from mla_conformance.backends.layer.mla_sharding import Sharding, local_seq_lens, local_token
from mla_conformance.backends.layer.mla_workspace import ContextPlan


class ContextShares(NamedTuple):
    """The shares of W ranks in the C chunks of the contexts of B prefills.

    A rank's part of a chunk are its own tokens, requests end to end, without gaps between them: it reads nothing
    through the block table but what it holds. Parts are sent as long as the longest; what the others hold behind their
    last token is not looked at.

    Attributes:
        cu_seq_lens: [C, B + 1] int32, on the device; which rows of this rank's part are whose.
        starts: [C, B] int32, on the device; first of this rank's tokens of each request in the chunk.
        rows: length of the longest part of each chunk.
        order: of each chunk [tokens] int64, on the device; where each of its tokens lies among the parts of all ranks,
            requests end to end and each in the order of its positions.
    """

    cu_seq_lens: torch.Tensor
    starts: torch.Tensor
    rows: list[int]
    order: list[torch.Tensor]


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
    order = [
        _order(first[chunk], lengths[chunk], sharding, room, bounds[:, chunk], starts[:, chunk]).to(device)
        for chunk, room in enumerate(rows)
    ]
    own_bounds, own_starts = (x[sharding.rank].to(device, torch.int32) for x in (bounds, starts))
    return ContextShares(own_bounds, own_starts, rows, order)


def _order(
    first: torch.Tensor,
    lengths: torch.Tensor,
    sharding: Sharding,
    room: int,
    bounds: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """[tokens] rows of a chunk's tokens among the parts of all ranks, which have ``room`` rows each.

    Args:
        first: [B] first token of each request.
        lengths: [B] tokens of each request.
        sharding: of any rank.
        room: rows of a part.
        bounds: [W, B + 1] which rows of a part are whose.
        starts: [W, B] first of a rank's own tokens of each request.
    """
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    before = lengths.cumsum(dim=0) - lengths
    owner, local = local_token(torch.arange(len(request)) - before[request] + first[request], sharding)
    return owner * room + bounds[owner, request] + local - starts[owner, request]
