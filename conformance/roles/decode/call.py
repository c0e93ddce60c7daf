"""A call of a decode backend on one rank."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, output_of
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.kv_cache import local_length


def rank_operands(
    whole: AttentionOperands, totals: tuple[int, ...], *, rank: int, world_size: int, interleave: int
) -> AttentionOperands:
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
    return AttentionOperands(whole.q, whole.k[rows], whole.v[rows], queries, keys, False, dequantised=whole.dequantised)


@dataclass(frozen=True, kw_only=True)
class DecodeCall(AttentionCall):
    """``run_decode`` on one rank; q, k and v are what it means: [T, N, L + R], [S, 1, L + R], [S, 1, L] in float64."""

    metadata: MLACommonDecodeMetadata
    holds_codes: bool  # whether the cache stores codes, not values of the model's dtype
    lse: bool  # whether the LSE is asked for; a case that is about outputs leaves it to others

    entry = "run_decode"
    interface: ClassVar = MLADecodeBackend
    means: ClassVar = {"q": "T", "k": "S", "v": "S"}

    @property
    def name(self) -> str:
        return "decode" if self.metadata.dcp_world_size == 1 else f"rank {self.metadata.dcp_rank}"

    @property
    def returns_lse(self) -> bool:
        """A rank's always, which is merged by it."""
        return self.lse or self.metadata.dcp_world_size > 1

    def invoke(self, backend: MLADecodeBackend, out: Guarded | None) -> Any:
        result = super().invoke(backend, out)
        return result if self.returns_lse else output_of(result)

    def operands(self) -> AttentionOperands:
        starts, metadata = (self.query_start_loc, self.key_start_loc), self.metadata
        whole = AttentionOperands(self.q, self.k, self.v, *starts, causal=True, dequantised=self.holds_codes)
        if metadata.dcp_tot_seq_lens is None:
            return whole
        return rank_operands(
            whole,
            tuple(metadata.dcp_tot_seq_lens.tolist()),
            rank=metadata.dcp_rank,
            world_size=metadata.dcp_world_size,
            interleave=metadata.cp_kv_cache_interleave_size,
        )
