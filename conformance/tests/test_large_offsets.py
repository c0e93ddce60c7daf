"""Operands beyond 2^31 on a CPU: offsets of 32 bits are found, at next to no memory; so are grids of 65,535 rows."""

import resource
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.drawn import judged
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CAPABILITIES, is_due_on_gpu

LARGE = [case.id for case in CAPABILITIES["large_offsets"].cases if not is_due_on_gpu(case)]


def found_by(x: Tensor, unit: int = 1) -> Tensor:
    """The rows of ``x`` as an int32 offset finds them, in units of so many elements; zeros where it is negative."""
    rows = x.contiguous().clone()
    for row in range(len(x)):
        if row * x.stride(0) // unit >= 2**31:
            rows[row].view(torch.uint8).fill_(0)
    return rows


class FarBlocks(EagerDecodeBackend):
    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        return super().run_decode(ql_nope, q_pe, found_by(kv_cache), k_scale)


class FarScales(EagerIndexerBackend):
    """Codes are found by their bytes, scales by floats."""

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        rows = k.contiguous().clone()
        behind = k.shape[1] * 128
        rows.view(len(k), -1)[:, behind:] = found_by(k, unit=4).view(len(k), -1)[:, behind:]
        return super().run_index_logits(q, weights, rows, k_scale)


class FarLogits(EagerTopKBackend):
    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        return super().run_top_k_per_row(found_by(logits), topk_tokens)


class FarSlots(EagerCacheBackend):
    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        blocks = slot_mapping // kv_cache.shape[1]
        near = torch.where(blocks * kv_cache.stride(0) < 2**31, slot_mapping, -1)
        super().run_write_latent(kv_c, k_pe, kv_cache, near, k_scale)


class GridOfRows(EagerCacheBackend):
    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        super().run_write_latent(kv_c[:65535], k_pe[:65535], kv_cache, slot_mapping[:65535], k_scale)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        (FarBlocks, "large_offsets:call=decode;dims=small;heads=1;q=[1,2];kv=[200,70];far=cache31"),
        (FarScales, "large_offsets:call=index_logits;heads=2;q=[2,1];kv=[200,70];far=cache31"),
        (FarLogits, "large_offsets:call=select;q=[1x6];kv=[300,70,5,90,200,40];far=q31;topk=16"),
        (FarSlots, "large_offsets:call=write_latent;dims=16-8-16-32;q=[5,1,30];kv=[40,0,20];page=16;far=cache31"),
        (GridOfRows, "many_rows:call=write_latent;dims=16-8-16-32;q=[65537];kv=[9];page=16"),
    ],
)
def test_offsets_of_32_bits_and_grids_that_end_are_found_on_a_cpu(kernel: type, case: str) -> None:
    record = judged(kernel, case, Context())
    assert record.status is Status.FAIL, record.message


def test_what_reaches_far_takes_no_memory_and_a_right_kernel_passes() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in LARGE[-19:]:
        record = judged("EAGER", case, Context())
        assert record.status is Status.PASS, (case, record.message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # 256 MiB
