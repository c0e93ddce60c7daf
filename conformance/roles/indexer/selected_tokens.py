"""Which tokens of its rows an indexer's selection names."""

import torch

from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.selection import NOTHING
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.indexer.call import IndexerCall


def positions_of(call: IndexerCall, rows: JudgedRows, numbers: torch.Tensor) -> torch.Tensor:
    """[n, K] int64 positions that selected numbers [n, K] of judged rows stand for; -1 for -1, -2 for no such token."""
    if call.case.space == IndexSpace.POSITION:
        return numbers.where(numbers >= NO_KEY, NOTHING)
    starts = torch.tensor(call.key_start_loc, device=numbers.device)
    request = rows.pick(call.metadata.req_id_per_token.long())
    first, end = starts[request].unsqueeze(1), starts[request + 1].unsqueeze(1)
    blocks, page = call.stored.shape[:2] if call.case.is_paged else (len(call.stored), 1)
    keys = numbers.new_full((blocks * page,), NOTHING)
    keys[call.slots.to(numbers.device)] = torch.arange(len(call.slots), device=numbers.device)
    key = keys[numbers.clamp(0, len(keys) - 1)].where((numbers >= 0) & (numbers < len(keys)), NOTHING)
    own = (key >= first) & (key < end)
    return (key - first).where(own, NOTHING).where(numbers != NO_KEY, NO_KEY)
