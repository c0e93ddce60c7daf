"""Which tokens of a sequence a decode-context-parallel rank stores, and where."""

from typing import NamedTuple

import torch


class Sharding(NamedTuple):
    """Ranks take turns of ``interleave`` consecutive tokens: token t belongs to rank (t // interleave) % world_size."""

    world_size: int = 1
    rank: int = 0
    interleave: int = 1


def local_seq_lens(seq_lens: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """[B] tokens of each sequence on this rank."""
    turn = sharding.world_size * sharding.interleave
    left = seq_lens % turn - sharding.rank * sharding.interleave
    return seq_lens // turn * sharding.interleave + left.clamp(min=0, max=sharding.interleave)


def local_token(token: torch.Tensor, sharding: Sharding) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank that stores each token, its number among the tokens of that rank)."""
    turns, within = token // sharding.interleave, token % sharding.interleave
    return turns % sharding.world_size, turns // sharding.world_size * sharding.interleave + within
