"""Device capabilities as far as a CPU shows them, offsets beyond 2^31 too; a GPU's own part runs where there is one."""

import resource
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.defects.bases import CapturablePrefill
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import stored
from mla_conformance.judging.golden import Reach, needed_bytes
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.tests.drawn import CONTEXT, judged
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import CAPABILITIES, is_due_on_gpu

GRAPH = "cuda_graph:call=new_tokens;dims=small;heads=2;q=[5,33,1,17]"
RANKED = "prefill-replay-keeps-the-ranks-of-lengths"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class UniformDecodes(EagerDecodeBackend):
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


DECODES = "cuda_graph:call=decode;dims=small;heads=2;q={};kv=[200,64,30,129,17,100];page=16"
NOT_DECLARED = "CUDA graphs of such a batch not declared (cudagraph_support NEVER, needed ALWAYS)"
STREAMS = next(case.id for case in CAPABILITIES["streams"].cases if case.role is Role.PREFILL)


@pytest.mark.parametrize(
    ("kernel", "case", "status", "said"),
    [
        (CapturablePrefill, GRAPH, Status.PASS, ""),
        (known_defects()[RANKED].kernel, stored().killing_cases[RANKED], Status.FAIL, "replayed"),
        (EagerPrefillBackend, GRAPH, Status.UNSUPPORTED, NOT_DECLARED),
        (UniformDecodes, DECODES.format("[1x6]"), Status.PASS, ""),
        (UniformDecodes, DECODES.format("[4x6]"), Status.UNSUPPORTED, "needed UNIFORM_BATCH"),
        ("EAGER", "graph_replay:call=decode;q=[1,1];kv=[9,5];ranks=2", Status.UNSUPPORTED, "one rank"),
        ("EAGER", "sparse_layer_graph:call=sparse_layer;q=[1];kv=[9];tp=2", Status.UNSUPPORTED, "one rank"),
        (EagerPrefillBackend, STREAMS, Status.UNSUPPORTED, "needs a CUDA device"),
    ],
)
def test_a_graph_is_asked_for_where_it_is_declared_and_what_it_froze_is_found(
    kernel: type | str, case: str, status: Status, said: str
) -> None:
    found = judged(kernel, case)
    assert found.status is status and said in found.message


class WrapsAroundItsQueries(EagerSparseBackend):
    """Reads what lies beyond 2^12 elements of the queries from where it is modulo that."""

    def run_sparse_prefill(self, q: Any, *operands: Any, **options: Any) -> Any:
        wrapped = q.reshape(-1)[torch.arange(q.numel()) % 2**12].view(q.shape)
        return super().run_sparse_prefill(wrapped, *operands, **options)


class WrapsAround(EagerPrefillBackend):
    """Writes what lies beyond 2^12 elements to where it is modulo that."""

    def run_prefill_context_chunk(self, chunk_idx: int, q: Any, k: Any, v: Any) -> Any:
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        wrapped = torch.full_like(output, torch.nan)
        wrapped.view(-1)[torch.arange(output.numel()) % 2**12] = output.reshape(-1)
        return wrapped, lse


@pytest.mark.parametrize(
    ("wrong", "case", "checks"),
    [
        (WrapsAround, "context_chunk;q=[9];kv=[40];far=rows31", {Check.MASK}),
        (WrapsAroundItsQueries, "sparse_prefill;q=[9];kv=[40];topk=16;far=rows31;spare=3;lse=0", {Check.OUTPUT}),
    ],
)
def test_far_rows_and_blocks_are_judged_and_found_wrong(
    wrong: type, case: str, checks: set[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reach, "of", staticmethod(lambda case: Reach(case.far[:-2], 2**12)))
    monkeypatch.setattr("mla_conformance.trials.subject.device_reasons", lambda *_: [])
    right, found = (judged(each, f"large_offsets:dims=small;heads=2;call={case}") for each in (wrong.__mro__[1], wrong))
    assert right.status is Status.PASS and found.status is Status.FAIL and found.check in checks


def test_the_memory_that_a_case_needs_is_stated() -> None:
    near = Case.of(capability="large_offsets", call="context_chunk", q=(40,), kv=(40,), heads=128, far="rows31")
    assert 15 * 2**30 < needed_bytes(near) < 24 * 2**30
    assert needed_bytes(Case.parse(near.id.replace("31", "32"))) < 139 * 2**30
    with pytest.raises(CaseError, match="field far"):
        Case.of(capability="large_offsets", q=(1,), far="k30")


@needs_cuda
@pytest.mark.parametrize("case", CAPABILITIES["streams"].cases, ids=lambda case: case.id)
def test_what_leaves_the_stream_is_found(case: Case) -> None:
    if case.role is not Role.PREFILL:
        pytest.skip("a prefill backend is asked")
    for name, status in (("EAGER", Status.PASS), (f"{__file__}:OnTheDefaultStream", Status.FAIL)):
        assert judge_one(Subject.of(name, torch.device("cuda", 0)), case, CONTEXT).status is status


class OnTheDefaultStream(EagerPrefillBackend):
    def _elsewhere(self, call: Any, *args: Any, **options: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return call(*args, **options)

    def run_prefill_new_tokens(self, *args: Any, **options: Any) -> Any:
        return self._elsewhere(super().run_prefill_new_tokens, *args, **options)

    def run_prefill_context_chunk(self, *args: Any, **options: Any) -> Any:
        return self._elsewhere(super().run_prefill_context_chunk, *args, **options)


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
    def run_write_latent(self, kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, k_scale: Any) -> None:
        blocks = slot_mapping // kv_cache.shape[1]
        near = torch.where(blocks * kv_cache.stride(0) < 2**31, slot_mapping, -1)
        super().run_write_latent(kv_c, k_pe, kv_cache, near, k_scale)


class GridOfRows(EagerCacheBackend):
    def run_write_latent(self, kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, k_scale: Any) -> None:
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
