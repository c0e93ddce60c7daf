"""Batches drawn for replays and for other sizes: what they hold, and that a case always has the same."""

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.trials.graph import captured_batch, replayed_batch
from mla_conformance.trials.transform import of_size

DECODE = Case.parse("cuda_graph:call=decode;q=[1x8];kv=[2000,64,300,129,17,1000,40,5];page=64")
PREFILL = Case.parse("cuda_graph:q=[5,130,1,64]")
SEVERAL = Case.parse("cuda_graph:call=decode;q=[4x3];kv=[2000,64,300];page=64")
SEEDS = range(2, 40)


def test_rows_of_replays_grow_shrink_stay_and_have_no_context_or_one_token_of_it() -> None:
    first, replays = captured_batch(DECODE).kv, [replayed_batch(DECODE, 8, seed).kv for seed in SEEDS]
    for lengths in replays:
        pairs = list(zip(lengths, first, strict=True))
        assert {0, 1} <= set(lengths) and any(now == then for now, then in pairs)
        assert sum(lengths) <= sum(DECODE.kv)
    assert all(min(column) < then < max(column) for column, then in _columns(replays))
    assert len(set(replays)) == len(replays)


def _columns(replays: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """The lengths of each row in all replays, beside its captured one."""
    return list(zip(zip(*replays, strict=True), captured_batch(DECODE).kv, strict=True))


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_smaller_batches_are_padded_and_fit(requests: int) -> None:
    for seed in SEEDS:
        decode, prefill = replayed_batch(DECODE, requests, seed), replayed_batch(PREFILL, min(requests, 4), seed)
        assert (len(decode.q), decode.pad) == (requests, 8 - requests)
        assert len(prefill.q) == 4 and sum(prefill.q) <= sum(PREFILL.q)
        assert set(prefill.q[min(requests, 4) :]) <= {0}


def test_a_decode_of_several_tokens_is_never_padded() -> None:
    batch = replayed_batch(SEVERAL, 1, seed=2)
    assert (batch.q, batch.pad) == (SEVERAL.q, 0)


def test_a_case_always_has_the_same_batches() -> None:
    assert replayed_batch(DECODE, 5, 3) == replayed_batch(Case.parse(DECODE.id), 5, 3) != replayed_batch(DECODE, 5, 4)
    assert of_size(PREFILL, 9) == of_size(Case.parse(PREFILL.id), 9)


def test_batches_of_other_sizes_have_requests_of_the_case_and_other_values() -> None:
    mixed = Case.parse("call_order:call=context_chunk;q=[5,40];kv=[140,33]")
    for requests in (1, 3, 5):
        other = of_size(mixed, requests)
        assert len(other.q) == requests and other.seed != mixed.seed
        assert set(zip(other.q, other.kv, strict=True)) <= set(zip(mixed.q, mixed.kv, strict=True))
