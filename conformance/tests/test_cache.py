"""Caches written, gathered, addressed and compressed into: what must be written, what must stay, what is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.backends import eager_compress
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import Check, Status
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.written import CacheImage, WrittenEntries, WrittenRows
from mla_conformance.roles.cache import case
from mla_conformance.roles.compress.problem import EPS, CompressBatch
from mla_conformance.roles.definition import build_problem
from mla_conformance.tests.drawn import CPU, changed, judged

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


def call_of(text: str) -> Any:
    (call,) = build_problem(Case.parse(text), CPU).calls
    return call


def image(text: str) -> CacheImage:
    (found,) = call_of(text).written.values()
    storage_bytes(found.cache).copy_(found.after)
    return found


def rows(text: str, name: str) -> WrittenRows:
    found = call_of(text).written[name]
    found.cache[: len(found.low)] = found.low
    return found


@pytest.mark.parametrize("text", EACH)
def test_a_call_that_writes_nothing_fails(text: str) -> None:
    idle = changed(EagerCacheBackend, **{f"run_{Case.parse(text).call}": lambda *_, **__: None})
    record = judged(idle, text)
    assert (record.status, record.check) == (Status.FAIL, Check.WRITTEN) and record.message.endswith("(SPEC 9.1)")


@pytest.mark.parametrize("layout", ["auto", "fp8_v4", *case.INDEX_CACHES])
def test_what_was_written_beside_an_entry_is_told(layout: str) -> None:
    text = f"{KEYS}={layout}" if layout in case.INDEX_CACHES else f"{WRITE};cache={layout};dims=128-0-128-512"
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


def test_an_entry_of_several_tokens_is_written_by_the_last_of_them() -> None:
    text = "slot_mapping:q=[9];kv=[2];page=2;ratio=4"
    first = int(call_of(text).named["block_table"][0, 0]) * 2
    assert rows(text, "slot_mapping").low[:9].tolist() == [-1, first, -1, -1, -1, first + 1, -1, -1, -1]


MIXED = "compress_continued:call=compress;q=[9,0,13,1];kv=[7,9,0,3];overlap=1;chunk=2;layers=2;pad=1;page=2"


def by_hand(batch: CompressBatch, request: int, group: int) -> torch.Tensor:
    """[D] float64: an entry by the definition, token after token and column after column."""
    case, (ape, weight) = batch.case, batch.weights
    first, ratio, width = sum(case.totals[:request]), case.ratio, case.head_dim
    kv, score = batch.projected.double().chunk(2, dim=1)
    own = [(group * ratio + place, place, case.overlap * width) for place in range(ratio)]
    before = [((group - 1) * ratio + place, place, 0) for place in range(ratio)] if case.overlap and group else []
    entry = torch.zeros(width, dtype=torch.float64)
    for column in range(width):
        taken = [(first + token, place, half + column) for token, place, half in (*before, *own)]
        logits = torch.stack([score[row, at] + ape[place, at] for row, place, at in taken])
        entry[column] = sum(p * kv[row, at] for p, (row, _, at) in zip(logits.softmax(0), taken, strict=True))
    if case.norm:
        entry = entry / (entry.square().mean() + EPS).sqrt() * weight
    turns = batch.table.double()[group * ratio]
    for pair in range(case.rope_dim // 2):
        at = width - case.rope_dim + 2 * pair
        cos, sin, (a, b) = turns[pair], turns[case.rope_dim // 2 + pair], entry[at : at + 2].tolist()
        entry[at], entry[at + 1] = a * cos - b * sin, b * cos + a * sin
    return entry


@pytest.mark.parametrize(
    "text",
    [
        "compress_keys:call=compress;dims=6-4-8-8;dtype=fp32;q=[11,5];kv=[0,3];overlap=1",
        "compress_keys:call=compress;dims=6-0-8-8;dtype=fp32;q=[7,3];kv=[0,1];ratio=3;norm=0",
        "compress_keys:call=compress;dims=4-2-8-8;dtype=fp32;q=[9];kv=[0];ratio=2;overlap=1;data=peaked",
    ],
)
def test_golden_entries_are_those_of_the_definition(text: str) -> None:
    case: Any = Case.parse(text)
    batch = CompressBatch(case, CPU)
    image = batch.calls()[0].written["kv_cache"]
    assert isinstance(image, WrittenEntries) and image.bounds is not None
    low, high = image.bounds
    number = 0
    for request, total in enumerate(batch.case.totals):
        for group in range(total // batch.case.ratio):
            entry = by_hand(batch, request, group)
            assert bool((low[number] <= entry).all() and (entry <= high[number]).all())
            assert torch.allclose((low[number] + high[number]).double() / 2, entry, rtol=1e-4, atol=1e-5)
            number += 1
    assert number == len(low)


@pytest.mark.parametrize(
    ("touch", "said"),
    [
        (lambda _, entries, states: storage_bytes(entries)[0].fill_(7), "bytes of the buffer of the cache were writ"),
        (lambda _, entries, states: entries[0, 1].fill_(1), "slot 1 of the cache was written, nothing belongs there"),
        (lambda _, entries, states: states[0, 1].fill_(1), "slot 1 of the states was written, nothing belongs there"),
    ],
)
def test_wrong_writes_are_told(touch: Callable[..., Any], said: str) -> None:
    def step(run: Any, *inputs: torch.Tensor, **operands: torch.Tensor) -> None:
        run(*inputs, **operands)
        touch(run.args[0], operands["kv_cache"], operands["state_cache"])

    record = judged(changed(eager_compress.EagerCompressBackend, run_compress=step), MIXED)
    assert record.status is Status.FAIL and said in record.message and "SPEC 9.1" in record.message


@pytest.mark.parametrize("text", [*EACH, MIXED])
def test_what_is_handed_to_a_kernel_does_not_say_what_is_right(text: str) -> None:
    for name, written in call_of(text).handed().written.items():
        hidden: Any = [written.after] if isinstance(written, CacheImage) else None
        if isinstance(written, WrittenEntries):  # nothing is expected of states
            hidden = written.bounds or () if name == "state_cache" else written.bounds
        elif isinstance(written, WrittenRows):
            hidden = [written.low, written.high]
        assert hidden is not None and all(x.is_meta for x in hidden) and not written.cache.is_meta


DECLARED: dict[str, Any] = {"supported_input_dtypes": [torch.float32]}
DECLARED |= {"supports_compression": classmethod(lambda cls, each: each.ratio == 4 and not each.overlap)}
FOUR_ALONE = type("FourAlone", (eager_compress.EagerCompressBackend,), DECLARED)


@pytest.mark.parametrize("fields", ["", ";ratio=3", ";overlap=1", ";inputs=model"])
def test_what_is_not_declared_is_unsupported(fields: str) -> None:
    expected = Status.UNSUPPORTED if fields else Status.PASS
    assert judged(FOUR_ALONE, f"compress_keys:call=compress;q=[9,3];kv=[0,0]{fields}").status is expected
