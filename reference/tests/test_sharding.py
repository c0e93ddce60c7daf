"""Sharding: small deals written out by hand, and the laws that every deal keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.kv_cache import local_length, local_positions


@pytest.mark.parametrize(
    ("length", "world_size", "interleave", "shares"),
    [
        (7, 2, 1, [(0, 2, 4, 6), (1, 3, 5)]),
        (2, 3, 1, [(0,), (1,), ()]),
        (10, 2, 4, [(0, 1, 2, 3, 8, 9), (4, 5, 6, 7)]),
        (9, 3, 2, [(0, 1, 6, 7), (2, 3, 8), (4, 5)]),
        (5, 4, 64, [(0, 1, 2, 3, 4), (), (), ()]),
        (6, 2, 3, [(0, 1, 2), (3, 4, 5)]),
        (0, 2, 1, [(), ()]),
        (3, 1, 2, [(0, 1, 2)]),
    ],
)
def test_deals_by_hand(length: int, world_size: int, interleave: int, shares: list[tuple[int, ...]]) -> None:
    deal = {"world_size": world_size, "interleave": interleave}
    assert [local_positions(length, rank=rank, **deal) for rank in range(world_size)] == shares
    assert [local_length(length, rank=rank, **deal) for rank in range(world_size)] == list(map(len, shares))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(length=st.integers(0, 400), world_size=st.integers(1, 9), interleave=st.integers(1, 70))
def test_every_token_has_one_owner_and_keeps_its_order(length: int, world_size: int, interleave: int) -> None:
    deal = {"world_size": world_size, "interleave": interleave}
    shares = [local_positions(length, rank=rank, **deal) for rank in range(world_size)]
    assert sorted(position for share in shares for position in share) == list(range(length))
    for rank, share in enumerate(shares):
        assert list(share) == sorted(share) and len(share) == local_length(length, rank=rank, **deal)
        assert all(position // interleave % world_size == rank for position in share)


@pytest.mark.parametrize("numbers", [(-1, 0, 2, 1), (3, 2, 2, 1), (3, -1, 2, 1), (3, 0, 2, 0), (3, 0, 0, 1)])
def test_misfits_are_refused(numbers: tuple[int, int, int, int]) -> None:
    length, rank, world_size, interleave = numbers
    with pytest.raises(ValueError, match=f"got {length}, rank {rank} of {world_size} and {interleave}"):
        local_length(length, rank=rank, world_size=world_size, interleave=interleave)
