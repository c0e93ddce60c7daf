"""Caches written, gathered and addressed: what must be written, what must stay, and what is said of either."""

import pytest
import torch

from mla_conformance.api.function_case import find_case
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.defects.honest_cache import HONEST_CACHES
from mla_conformance.defects.known import known_defects
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.cache_bytes import TIE_SLACK, CacheImage
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.written_entries import WrittenEntries
from mla_conformance.problems.written_rows import WrittenRows
from mla_conformance.reference.cache_layout import decode_rows, steady
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.kv_cache import read_entries
from mla_conformance.roles.cache.case import INDEX_CACHES, CacheCase
from mla_conformance.roles.cache.problem import CacheBatch, CacheCall
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
CONTEXT = Context()
DIMS = "dims=128-0-128-128"
WRITE = "latent_write:call=write_latent;q=[5,1];kv=[60,0]"
KEYS = f"index_write:call=write_index;{DIMS};q=[5,1];kv=[60,0];cache"
GATHER = "latent_gather:call=gather_latent;q=[5,0,3];kv=[60,2,7]"
MAPPING = "slot_mapping:q=[5,1];kv=[60,0]"
LISTS = "global_slots:q=[2,1];kv=[60,3]"
EACH = (
    WRITE,
    f"{WRITE};cache=nvfp4_ds_mla",
    f"{KEYS}=fp8_index_shuffled;layers=2",
    f"{GATHER};cache=fp8_ds_mla;dequantise=1",
    f"index_gather:call=gather_index;{DIMS};q=[5,0,3];kv=[60,2,7];cache=fp8_index_flat;page=1",
    f"{MAPPING};ratio=4",
    f"{LISTS};outside=1",
)


def calls(text: str) -> list[CacheCall]:
    found = build_problem(Case.parse(text), CPU).calls
    assert all(isinstance(call, CacheCall) for call in found)
    return list(found)  # type: ignore[arg-type]


def verdict(kernel: type, text: str) -> tuple[Status, str | None, str]:
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", CPU)
    record = judge_one(subject, Case.parse(text), CONTEXT)
    return record.status, record.check, record.message


def image(text: str) -> CacheImage:
    """Of a call that has written what it must."""
    (found,) = calls(text)[0].written.values()
    assert isinstance(found, CacheImage)
    storage_bytes(found.cache).copy_(found.after)
    return found


def rows(text: str, name: str) -> WrittenRows:
    """The same of rows."""
    found = calls(text)[0].written[name]
    assert isinstance(found, WrittenRows)
    found.cache.view(torch.uint8).view(len(found.cache), -1)[: len(found.low)] = found.low.view(torch.uint8).view(
        len(found.low), -1
    )
    return found


@pytest.mark.parametrize("text", EACH)
@pytest.mark.parametrize("kernel", HONEST_CACHES, ids=lambda kernel: kernel.__name__)
def test_honest_operations_pass_what_they_declare(kernel: type, text: str) -> None:
    assert verdict(kernel, text)[0] in (Status.PASS, Status.UNSUPPORTED)


@pytest.mark.parametrize("text", EACH)
def test_a_call_that_writes_nothing_fails(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls(text)[0]
    monkeypatch.setattr(HONEST_CACHES[0], f"run_{call.case.call}", lambda *_, **__: None)
    status, check, message = verdict(HONEST_CACHES[0], text)
    assert (status, check) == (Status.FAIL, Check.WRITTEN) and message.endswith("(SPEC 9.1)")


@pytest.mark.parametrize("layout", ["auto", "fp8_v4", *INDEX_CACHES])
def test_what_was_written_beside_an_entry_is_told(layout: str) -> None:
    text = f"{KEYS}={layout}" if layout in INDEX_CACHES else f"{WRITE};cache={layout};dims=128-0-128-512"
    right = image(f"{text};layers=2")
    assert right.difference() == ""
    own = {int(slot) for slot in right.slots}
    other = next(slot for slot in range(right.cache.shape[0] * right.cache.shape[1]) if slot not in own)
    block, token = divmod(other, right.cache.shape[1])
    if layout in ("auto", "fp8_index_flat"):
        right.cache.view(torch.uint8)[block, token, 3] ^= 1
        assert right.difference() == f"slot {other} of the cache was written, no new token belongs there"
    storage_bytes(right.cache)[0] ^= 1
    assert right.difference() == "bytes of the cache's buffer were written that are not this layer's"


def test_the_byte_that_a_layout_does_not_use_is_free_and_a_code_is_not() -> None:
    right = image(f"{WRITE};cache=fp8_v4;dims=128-0-128-512")
    block, token = divmod(int(right.slots[0]), right.cache.shape[1])
    behind = right.cache[block].flatten()[right.cache.shape[1] * 576 :]
    behind[token * 8 + 7] = 0x77
    assert right.difference() == ""
    right.cache[block].flatten()[token * 576] ^= 1
    assert "is not the code nearest to the new token's" in right.difference()


def test_rows_say_where_they_are_wrong_or_were_written_too_far() -> None:
    right = rows(GATHER, "workspace")
    assert right.difference() == ""
    right.cache[6, 2] += 1
    assert right.difference().startswith("row 6 of workspace (number 1 of request 2), column 2, is ")
    right.cache[8] = 0
    assert right.difference() == "row 8 of workspace was written, only 8 are asked for"
    right.reset()
    storage_bytes(right.cache)[-1] ^= 1
    assert right.difference() == "bytes beside workspace were written"


def test_dequantised_values_are_right_within_the_rounding_of_what_they_mean() -> None:
    right = rows(f"{GATHER};cache=fp8_ds_mla;dequantise=1", "workspace")
    value = right.cache[0, 0].clone()
    right.cache[0, 0] = torch.nextafter(value, torch.tensor(torch.inf, dtype=value.dtype))
    assert "row 0 of workspace (number 0 of request 0), column 0, is " in right.difference()
    right.cache[0, 0] = torch.nan
    assert "is nan" in right.difference()


def test_tokens_without_a_slot_stand_behind_and_between_and_hold_other_poison() -> None:
    (call,) = calls(f"{WRITE};pad=3")
    assert call.named["slot_mapping"][-3:].tolist() == [-1] * 3 and len(call.named["slot_mapping"]) == 9
    assert len(call.named["kv_c"]) == 12 and bool(call.named["kv_c"][-6:].isnan().all())
    mapped = [call.named["slot_mapping"] >= 0 for call in calls(f"{WRITE};ranks=2;page=16")]
    # Tokens 60 to 64 of the first request and token 0 of the second: even ones are the first rank's.
    assert mapped[0].tolist() == [True, False, True, False, True, True]
    assert torch.equal(mapped[1], ~mapped[0])


def test_ranks_write_each_entry_once_and_map_it_to_the_slot_that_they_write() -> None:
    fields = "q=[40,5];kv=[10,100];ranks=3;interleave=4;page=16"
    written = calls(f"latent_write:call=write_latent;dims=16-8-16-32;{fields}")
    mapped = calls(f"slot_mapping:{fields}")
    for one, other in zip(written, mapped, strict=True):
        slots, rows = one.named["slot_mapping"], other.written["slot_mapping"]
        assert isinstance(rows, WrittenRows)
        assert torch.equal(slots >= 0, rows.low[: len(slots)] >= 0)
        assert torch.equal(slots % 16, rows.low[: len(slots)] % 16)
    owners = torch.stack([call.named["slot_mapping"] >= 0 for call in written]).sum(dim=0)
    assert owners.tolist() == [1] * 45


def test_an_entry_of_several_tokens_is_written_by_the_last_of_them() -> None:
    (call,) = calls("slot_mapping:q=[9];kv=[2];page=2;ratio=4")
    rows = call.written["slot_mapping"]
    assert isinstance(rows, WrittenRows)
    first = int(call.named["block_table"][0, 0]) * 2
    assert rows.low[:9].tolist() == [-1, first, -1, -1, -1, first + 1, -1, -1, -1]


def test_slots_reach_beyond_int32() -> None:
    (call,) = calls(f"{MAPPING};spare={2**26}")
    rows = call.written["slot_mapping"]
    assert isinstance(rows, WrittenRows) and int(rows.low.max()) > 2**31


def test_lists_hold_ends_of_pages_and_what_has_no_slot() -> None:
    (call,) = calls(f"{LISTS};topk=64;page=16;outside=1")
    listed, right = call.named["token_indices"], call.written["out"]
    assert isinstance(right, WrittenRows)
    room = call.named["block_table"].shape[1] * 16
    assert bool((listed == -1).any()) and bool((listed >= room).any()) and bool((listed == 61).any())
    assert torch.equal(right.low == -1, (listed < 0) | (listed >= room))


@pytest.mark.parametrize("text", [f"{WRITE};cache=fp4_v41;dims=128-0-128-512", f"{KEYS}=fp8_index;scales=pow2"])
def test_no_scale_is_on_an_edge_and_values_are_those_of_the_model(text: str) -> None:
    case = Case.parse(text)
    assert isinstance(case, CacheCase)
    batch = CacheBatch(case, CPU)
    keys, form = batch.latents[0], TILED_FORMATS[batch.case.cache]
    assert keys.dtype == torch.bfloat16 and bool(steady(keys, form, batch.case.scales, TIE_SLACK).all())
    meant = decode_rows(batch.entries, form.name, 1.0, *batch.case.latent_dims)[0]
    assert bool(((meant - keys.double()).abs() <= 0.3 * keys.double().abs().amax(1, keepdim=True)).all())


def test_a_gather_reads_entries_from_its_start_on() -> None:
    text = "latent_gather:call=gather_latent;dims=16-8-16-32;q=[3];kv=[9];page=4;ratio=2"
    (call,) = calls(text)
    table, right = call.named["block_table"][0], call.written["workspace"]
    assert isinstance(right, WrittenRows)
    slots = torch.tensor([int(table[at // 4]) * 4 + at % 4 for at in (4, 5, 6)])
    assert torch.equal(read_entries(call.named["kv_cache"], slots, "auto"), right.low)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{WRITE};cache=fp8_index;{DIMS}", "field cache: write_latent expects one of auto, fp8"),
        (f"{KEYS}=auto", "field cache: write_index expects one of fp8_index"),
        (f"{WRITE};dequantise=1", "only gather_latent does so"),
        (f"{WRITE};ratio=4", "field ratio: expected 1 of write_latent"),
        (f"{GATHER};ranks=2", "field ranks: expected 1 of gather_latent"),
        (f"{WRITE};ranks=2;interleave=24", "field interleave: expected a divisor of page 64, got 24"),
        (f"{KEYS}=fp8_index_shuffled;page=8", "expects a multiple of 16, got 8"),
        (f"{MAPPING};slots=int32;spare={2**26}", "slots beyond int32"),
        (f"{WRITE};cache=fp8_v41;dims=128-0-128-512;latents=tiny_values", "differ in the scales of tiny_values"),
        (f"{WRITE};cache=fp8;scales=pow2", "have no float32 scales"),
    ],
)
def test_cases_that_no_cache_has_are_refused(text: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        Case.parse(text)


def test_no_function_is_asked() -> None:
    with pytest.raises(InputError, match="judged by what it writes into memory around its operands"):
        find_case(WRITE)


@pytest.mark.parametrize("id", ["pool-written-past-its-end", "entry-stored-in-whole-vectors"])
def test_what_lies_beside_an_entry_or_a_pool_is_looked_at(id: str) -> None:
    status, check, message = verdict(known_defects()[id].kernel, f"{WRITE};cache=fp8_ds_mla;layers=2")
    assert (status, check) == (Status.FAIL, Check.WRITTEN)
    assert "bytes of the cache's buffer were written that are not this layer's" in message


@pytest.mark.parametrize("text", EACH)
def test_what_is_handed_to_a_kernel_does_not_say_what_is_right(text: str) -> None:
    (call,) = calls(text)
    for written in call.handed().written.values():
        assert not isinstance(written, WrittenEntries)
        hidden = (written.low, written.high) if isinstance(written, WrittenRows) else (written.after,)
        assert all(x.is_meta for x in hidden) and not written.cache.is_meta
