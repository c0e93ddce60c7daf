"""Batches drawn for replays, other sizes and other layers: what they hold, and that a case always has the same."""

from typing import Any

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.graph import captured_batch, replayed_batch
from mla_conformance.trials.transform import of_size, other_contents, over_metadata, shortened

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


@pytest.mark.parametrize("case", [PREFILL, Case.parse("call_order:call=context_chunk;q=[5,40];kv=[140,33]")])
def test_fourteen_shorter_batches_are_all_others(case: Case) -> None:
    batches = [shortened(case, number) for number in range(1, 15)]
    assert len({(batch.q, batch.kv, batch.seed) for batch in [case, *batches]}) == 15
    for batch in batches:
        lengths = zip((*batch.q, *batch.kv), (*case.q, *case.kv), strict=True)
        assert all(now <= then for now, then in lengths) and min(batch.q) > 0


@pytest.mark.parametrize(
    "text",
    [
        "call=chunked_context;dims=small;q=[5,3];kv=[40,70];workspace=128",
        "call=decode;dims=small;q=[1,1];kv=[40,70];data=integers",
        "call=sparse_decode;dims=small;heads=2;q=[1,1];kv=[40,70];fill=ragged",
        "call=index_topk;heads=4;q=[2,1];kv=[40,70]",
    ],
)
def test_another_layer_has_its_own_contents_in_the_blocks_of_the_batch(text: str) -> None:
    case = Case.parse(f"call_order:{text}")
    first, other = (build_problem(each, torch.device("cpu")) for each in (case, other_contents(case)))
    calls: Any = zip(first.calls, other.calls, over_metadata(other, first).calls, strict=True)
    for mine, theirs, shared in calls:
        assert shared.metadata is mine.metadata and not torch.equal(shared.k, mine.k)
        assert not torch.equal(shared.q, mine.q)
        for name in ("block_table", "query_start_loc", "seq_lens"):
            held = getattr(mine.metadata, name, None)
            assert held is None or torch.equal(held, getattr(theirs.metadata, name))


def test_another_layer_of_a_whole_model_writes_to_the_slots_of_the_batch() -> None:
    case = Case.parse("call_order:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[40,33];decodes=1")
    first, other = (build_problem(each, torch.device("cpu")).calls[0] for each in (case, other_contents(case)))
    mine: Any = first
    theirs: Any = other
    assert mine.requests == theirs.requests and torch.equal(mine.weight, theirs.weight)
    assert torch.equal(mine.image.slots, theirs.image.slots) and not torch.equal(mine.kv_c, theirs.kv_c)
