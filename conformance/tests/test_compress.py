"""The role compress: its golden entries, the pages that its states get, and what it tells of wrong writes."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.compress import Compression, MLACompressBackend
from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.roles import Role, role_of
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.defects.honest_cache import HONEST_COMPRESSORS
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.written_entries import WrittenEntries
from mla_conformance.reference.compress_keys import pooled, rms_norm, windows
from mla_conformance.reference.prepare_index import Prepared
from mla_conformance.roles.compress.case import CompressCase
from mla_conformance.roles.compress.problem import COMPRESS, EPS, CompressBatch, CompressCall
from mla_conformance.roles.compress.state_pages import StatePages
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
COMPRESSORS = [kernel for kernel in HONEST_COMPRESSORS if role_of(kernel) is Role.COMPRESS]
MIXED = "compress_continued:call=compress;q=[9,0,13,1];kv=[7,9,0,3];overlap=1;chunk=2;layers=2;pad=1;page=2"
POOLS = "compress_keys:call=compress;dims=16-0-16-16;q=[13,4];kv=[2,3];norm=0;inputs=model;state_page=3"


def parsed(text: str) -> CompressCase:
    case = Case.parse(text)
    assert isinstance(case, CompressCase)
    return case


def called(text: str) -> CompressCall:
    return CompressBatch(parsed(text), CPU).calls()[0]


def status(kernel: type, text: str) -> Status:
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", CPU)
    return judge_one(subject, Case.parse(text), Context()).status


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
    batch = CompressBatch(parsed(text), CPU)
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


def test_a_budget_holds_what_float32_makes_of_a_mean_and_a_norm() -> None:
    generator = torch.Generator().manual_seed(1)
    k, score, weight = (torch.randn(*shape, generator=generator) for shape in ((50, 8, 64), (50, 8, 64), (64,)))
    ape = torch.randn(8, 64, generator=generator)
    golden = rms_norm(pooled(k.double(), 9 * score.double(), ape.double(), 0.0), weight, EPS)
    p = (9 * score + ape).softmax(dim=1)
    mean = (p * k).sum(dim=1)
    found = mean * (mean.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight
    share = (found - golden.values).abs() / golden.error(32, 0.0)
    assert 1e-4 < float(share.max()) < 0.5


def test_windows_take_the_group_before_from_the_first_half_of_the_columns() -> None:
    x = torch.arange(20.0).reshape(5, 4)
    assert windows(x, 2, True, -1.0).tolist() == [
        [[-1, -1], [-1, -1], [2, 3], [6, 7]],
        [[0, 1], [4, 5], [10, 11], [14, 15]],
    ]
    assert windows(x, 2, False, -1.0)[1].tolist() == x[2:4].tolist()
    assert isinstance(pooled(x[:2, None], x[:2, None], x[:1], 0.0), Prepared)


@pytest.mark.parametrize("kernel", COMPRESSORS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("text", [MIXED, POOLS])
def test_honest_compressors_pass(kernel: type, text: str) -> None:
    assert status(kernel, text) is Status.PASS


def test_a_request_goes_on_where_it_was_and_alone() -> None:
    steps = list(parsed(MIXED).steps())
    assert steps[0] == {0: range(7), 1: range(9), 3: range(3)}
    assert steps[1] == {0: range(7, 9), 2: range(2), 3: range(3, 4)}
    assert steps[-1] == {2: range(12, 13)}


def test_pages_of_states_are_dealt_out_again_and_kept_as_long_as_a_group_needs_them() -> None:
    case = parsed("compress_continued:call=compress;q=[20,8];kv=[0,0];chunk=1;overlap=1")
    dealt, holders = StatePages(case), dict[int, set[int]]()
    for step, tables in zip(case.steps(), dealt.tables(), strict=True):
        pages = [page for columns in tables.values() for page in columns.values()]
        assert len(set(pages)) == len(pages)
        for request, tokens in step.items():
            needed = range(max(0, (tokens.start // 4 - 1) * 4), tokens.stop)
            assert {token // case.state_page for token in needed} <= set(tables[request])
            for page in tables[request].values():
                holders.setdefault(page, set()).add(request)
    assert dealt.count == 4 and any(len(requests) > 1 for requests in holders.values())


class WritesBeside(EagerCompressBackend):
    """The bytes of another layer are touched."""

    def run_compress(
        self, kv: Any, score: Any, ape: Any, norm_weight: Any, cos_sin_cache: Any, state_cache: Any, kv_cache: Any
    ) -> None:
        super().run_compress(kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache)
        self.touch(kv_cache, state_cache)

    def touch(self, kv_cache: torch.Tensor, state_cache: torch.Tensor) -> None:
        storage_bytes(kv_cache)[0] = 7


class WritesAFreeSlot(WritesBeside):
    """An entry stands in block 0, which no request has."""

    def touch(self, kv_cache: torch.Tensor, state_cache: torch.Tensor) -> None:
        kv_cache[0, 1] = 1.0


class WritesOtherStates(WritesBeside):
    """A state stands in block 0."""

    def touch(self, kv_cache: torch.Tensor, state_cache: torch.Tensor) -> None:
        state_cache[0, 1] = 1.0


class WritesTooMuch(WritesBeside):
    """The first entry of a slot that is written is one too large."""

    def touch(self, kv_cache: torch.Tensor, state_cache: torch.Tensor) -> None:
        slots = self._compress_metadata.slot_mapping
        for slot in slots[slots >= 0].tolist():
            kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1], 3] += 1


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (WritesBeside, "bytes of the buffer of the cache were written that are not this layer's"),
        (WritesAFreeSlot, "slot 1 of the cache was written, nothing belongs there"),
        (WritesOtherStates, "slot 1 of the states was written, nothing belongs there"),
        (WritesTooMuch, "in column 3, expected"),
    ],
)
def test_wrong_writes_are_told(kernel: type, said: str) -> None:
    record = judge_one(Subject.of(f"{__name__}:{kernel.__name__}", CPU), Case.parse(MIXED), Context())
    assert record.status is Status.FAIL and said in record.message
    assert Check.WRITTEN in record.message or "SPEC 9.1" in record.message


def test_a_backend_is_handed_no_expected_entry() -> None:
    handed = called(MIXED).handed().written["kv_cache"]
    assert isinstance(handed, WrittenEntries) and handed.bounds and all(bound.is_meta for bound in handed.bounds)


class FourAlone(EagerCompressBackend):
    """It compresses groups of 4 without overlap alone."""

    supported_input_dtypes: ClassVar = [torch.float32]

    @classmethod
    def supports_compression(cls, compression: Compression) -> bool:
        return compression.ratio == 4 and not compression.overlap


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("", Status.PASS),
        (";ratio=3", Status.UNSUPPORTED),
        (";overlap=1", Status.UNSUPPORTED),
        (";inputs=model", Status.UNSUPPORTED),
    ],
)
def test_what_is_not_declared_is_unsupported(fields: str, expected: Status) -> None:
    assert status(FourAlone, f"compress_keys:call=compress;q=[9,3];kv=[0,0]{fields}") is expected


def test_a_compressor_refuses_what_does_not_fit() -> None:
    call = called(POOLS)
    kernel: MLACompressBackend = COMPRESS.kernel(EagerCompressBackend, call.case, torch.bfloat16, CPU)
    caches = {name: image.cache for name, image in call.written.items()}
    step = call.steps[0]
    kernel.prepare_metadata(replace(step.metadata, positions=step.metadata.positions.int()))
    with pytest.raises(ValueError, match=r"positions: expected \[5\] of torch.int64, got \[5\] of torch.int32"):
        kernel.run_compress(step.kv, step.score, **call.named, **caches)
    kernel.prepare_metadata(step.metadata)
    with pytest.raises(ValueError, match=r"ape: expected \[4, 16\]"):
        kernel.run_compress(step.kv, step.score, **{**call.named, "ape": call.named["ape"][:2]}, **caches)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("q=[0];kv=[0]", "expects a token"),
        ("q=[4];kv=[0];cache=fp8", "expects cache=auto on one rank"),
    ],
)
def test_a_malformed_case_says_what_was_expected(fields: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        Case.parse(f"compress_keys:call=compress;{fields}")
