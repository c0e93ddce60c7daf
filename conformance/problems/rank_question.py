"""What one of several ranks that share the tokens of each sequence is asked."""

from functools import partial

import torch

from mla_conformance.problems.calls import Question
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.kv_cache import local_length


def rank_question(whole: Question, totals: tuple[int, ...], *, rank: int, world_size: int, interleave: int) -> Question:
    """Attention of each query, which stands for itself, to the keys of this rank that it sees.

    The causal bound refers to the whole sequence, so these are the first few of the rank's keys, but not those of an
    aligned triangle.

    Args:
        whole: the queries of the batch and this rank's keys.
        totals: tokens of each request on all ranks.
        rank: this rank.
        world_size: ranks.
        interleave: consecutive tokens of a rank.
    """
    share = partial(local_length, rank=rank, world_size=world_size, interleave=interleave)
    batch = zip(segments(whole.query_start_loc), totals, whole.key_start_loc, strict=False)
    seen = [
        slice(first, first + share(max(0, total - rows.stop + row + 1)))
        for rows, total, first in batch
        for row in range(rows.start, rows.stop)
    ]
    rows = torch.cat([torch.arange(keys.start, keys.stop, device=whole.k.device) for keys in seen])
    queries, keys = tuple(range(len(seen) + 1)), start_loc([keys.stop - keys.start for keys in seen])
    return Question(whole.q, whole.k[rows], whole.v[rows], queries, keys, False, dequantised=whole.dequantised)
