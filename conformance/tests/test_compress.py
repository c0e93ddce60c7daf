"""The role compress: its golden entries, the pages that its states get, and what it tells of wrong writes."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends import compress, eager_compress
from mla_conformance.cases.case import Case
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.written import WrittenEntries
from mla_conformance.roles.compress.problem import EPS, CompressBatch
from mla_conformance.tests.drawn import CPU, judged

MIXED = "compress_continued:call=compress;q=[9,0,13,1];kv=[7,9,0,3];overlap=1;chunk=2;layers=2;pad=1;page=2"


def batch_of(text: str) -> CompressBatch:
    case: Any = Case.parse(text)
    return CompressBatch(case, CPU)


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
    batch = batch_of(text)
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


class Touches(eager_compress.EagerCompressBackend):
    """It changes something beside what it writes, or in it."""

    touch: ClassVar[Callable[[Any, torch.Tensor, torch.Tensor], object]]

    def run_compress(self, *inputs: torch.Tensor, **operands: torch.Tensor) -> None:
        super().run_compress(*inputs, **operands)
        self.touch(operands["kv_cache"], operands["state_cache"])


def first_entry(kernel: Any, entries: torch.Tensor, states: torch.Tensor) -> None:
    slots = kernel._compress_metadata.slot_mapping
    for slot in slots[slots >= 0].tolist():
        entries[slot // entries.shape[1], slot % entries.shape[1], 3] += 1


@pytest.mark.parametrize(
    ("touch", "said"),
    [
        (
            lambda _, entries, states: storage_bytes(entries)[0].fill_(7),
            "bytes of the buffer of the cache were written",
        ),
        (lambda _, entries, states: entries[0, 1].fill_(1), "slot 1 of the cache was written, nothing belongs there"),
        (lambda _, entries, states: states[0, 1].fill_(1), "slot 1 of the states was written, nothing belongs there"),
        (first_entry, "in column 3, expected"),
    ],
)
def test_wrong_writes_are_told(touch: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Touches, "touch", touch, raising=False)
    record = judged(Touches, MIXED)
    assert record.status is Status.FAIL and said in record.message and "SPEC 9.1" in record.message


def test_a_backend_is_handed_no_expected_entry() -> None:
    handed = batch_of(MIXED).calls()[0].handed().written["kv_cache"]
    assert isinstance(handed, WrittenEntries) and handed.bounds and all(bound.is_meta for bound in handed.bounds)


class FourAlone(eager_compress.EagerCompressBackend):
    """It compresses groups of 4 without overlap alone."""

    supported_input_dtypes: ClassVar = [torch.float32]

    @classmethod
    def supports_compression(cls, compression: compress.Compression) -> bool:
        return compression.ratio == 4 and not compression.overlap


@pytest.mark.parametrize("fields", ["", ";ratio=3", ";overlap=1", ";inputs=model"])
def test_what_is_not_declared_is_unsupported(fields: str) -> None:
    expected = Status.UNSUPPORTED if fields else Status.PASS
    assert judged(FourAlone, f"compress_keys:call=compress;q=[9,3];kv=[0,0]{fields}").status is expected
