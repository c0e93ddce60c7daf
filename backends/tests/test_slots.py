"""Where the tokens of a batch are, over pages that are anywhere, tables that hold anything behind, and loose maxima."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.slots import slots_of
from mla_conformance.backends.sparse import MLASparseMetadata

PAGE = 4
TABLE = torch.tensor([[5, 2, 7, 2**31 - 1], [-1, -1, -1, -1], [1, 4, -1, 99]], dtype=torch.int32)
LENGTHS = torch.tensor([9, 0, 5], dtype=torch.int32)


def lengths(**others: Any) -> dict[str, Any]:
    """What metadata of both kinds have."""
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    counts = {"query_start_loc": starts, "max_query_len": 1, "query_lens_cpu": starts.diff(), "seq_lens_cpu": LENGTHS}
    return {"seq_lens": LENGTHS, "max_seq_len": 9, **counts, **others}


@pytest.mark.parametrize("longest", [9, 200])
def test_the_slot_of_each_token_is_that_of_its_page_and_none_behind_the_last(longest: int) -> None:
    slots = slots_of(MLACommonDecodeMetadata(block_table=TABLE, **lengths(max_seq_len=longest)), PAGE)
    assert slots.shape == (3, longest) and slots.dtype == torch.int64
    assert slots[0, :9].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28]
    assert slots[2, :5].tolist() == [4, 5, 6, 7, 16]
    behind = torch.arange(longest) >= LENGTHS.unsqueeze(1)
    assert bool((slots[behind] == -1).all()) and bool((slots[~behind] >= 0).all())


def test_of_gathered_keys_it_is_a_row() -> None:
    gathered = torch.tensor([0, 9, 9], dtype=torch.int32)
    metadata = MLASparseMetadata(
        req_id_per_token=torch.arange(3, dtype=torch.int32),
        block_table=None,
        workspace_starts=gathered,
        index_space=IndexSpace.POSITION,
        **lengths(),
    )
    slots = slots_of(metadata, 1)
    assert [row[row >= 0].tolist() for row in slots] == [list(range(9)), [], list(range(9, 14))]
