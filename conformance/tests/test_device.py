"""Device capabilities as far as a CPU shows them, offsets beyond 2^31 too; a GPU's own part runs where there is one."""

import resource
from collections.abc import Callable
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
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import Capturable
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import stored
from mla_conformance.judging.golden import Reach
from mla_conformance.judging.record import Check, Status
from mla_conformance.tests.drawn import CONTEXT, changed, judged
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import CAPABILITIES, is_due_on_gpu

GRAPH = "cuda_graph:call=new_tokens;dims=small;heads=2;q=[5,33,1,17]"
RANKED = "prefill-replay-keeps-the-ranks-of-lengths"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class CapturablePrefill(Capturable, EagerPrefillBackend): ...


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
def test_a_graph_is_asked_for_where_it_is_declared(kernel: type | str, case: str, status: Status, said: str) -> None:
    found = judged(kernel, case)
    assert found.status is status and said in found.message


def wraps_around_its_queries(run: Any, q: Tensor, *operands: Any, **options: Any) -> Any:
    """Reads what lies beyond 2^12 elements of the queries from where it is modulo that."""
    return run(q.reshape(-1)[torch.arange(q.numel()) % 2**12].view(q.shape), *operands, **options)


def wraps_around(run: Any, *operands: Any) -> Any:
    """Writes what lies beyond 2^12 elements to where it is modulo that."""
    output, lse = run(*operands)
    wrapped = torch.full_like(output, torch.nan)
    wrapped.view(-1)[torch.arange(output.numel()) % 2**12] = output.reshape(-1)
    return wrapped, lse


CHUNK = "context_chunk;q=[9];kv=[40];far=rows31"
SELECTED = "sparse_prefill;q=[9];kv=[40];topk=16;far=rows31;spare=3;lse=0"


@pytest.mark.parametrize(
    ("base", "step", "case", "check"),
    [
        (EagerPrefillBackend, {"run_prefill_context_chunk": wraps_around}, CHUNK, Check.MASK),
        (EagerSparseBackend, {"run_sparse_prefill": wraps_around_its_queries}, SELECTED, Check.OUTPUT),
    ],
)
def test_far_rows_and_blocks_are_judged(base: type, step: Any, case: str, check: Check, monkeypatch: Any) -> None:
    monkeypatch.setattr(Reach, "of", staticmethod(lambda case: Reach(case.far[:-2], 2**12)))
    monkeypatch.setattr("mla_conformance.trials.subject.device_reasons", lambda *_: [])
    kernels = (base, changed(base, **step))
    right, found = (judged(each, f"large_offsets:dims=small;heads=2;call={case}") for each in kernels)
    assert right.status is Status.PASS and found.status is Status.FAIL and found.check == check


def on_the_default_stream(run: Any, *operands: Any, **options: Any) -> Any:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return run(*operands, **options)


class OnTheDefaultStream(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *operands: Any, **options: Any) -> Any:
        return on_the_default_stream(super().run_prefill_new_tokens, *operands, **options)

    def run_prefill_context_chunk(self, *operands: Any, **options: Any) -> Any:
        return on_the_default_stream(super().run_prefill_context_chunk, *operands, **options)


@needs_cuda
@pytest.mark.parametrize("case", [case for case in CAPABILITIES["streams"].cases if case.role is Role.PREFILL], ids=str)
def test_what_leaves_the_stream_is_found(case: Case) -> None:
    for name, status in (("EAGER", Status.PASS), (f"{__file__}:OnTheDefaultStream", Status.FAIL)):
        assert judge_one(Subject.of(name, torch.device("cuda", 0)), case, CONTEXT).status is status


LARGE = [case.id for case in CAPABILITIES["large_offsets"].cases if not is_due_on_gpu(case)]


def found_by(x: Tensor, unit: int = 1) -> Tensor:
    rows = x.contiguous().clone()
    for row in range(len(x)):
        if row * x.stride(0) // unit >= 2**31:
            rows[row].view(torch.uint8).fill_(0)
    return rows


def far_scales(run: Any, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
    """Codes are found by their bytes, scales by floats."""
    rows, behind = k.contiguous().clone(), k.shape[1] * 128
    rows.view(len(k), -1)[:, behind:] = found_by(k, unit=4).view(len(k), -1)[:, behind:]
    found: Tensor = run(q, weights, rows, k_scale)
    return found


def far_slots(run: Any, kv_c: Any, k_pe: Any, cache: Tensor, slots: Tensor, k_scale: Any) -> None:
    near = torch.where(slots // cache.shape[1] * cache.stride(0) < 2**31, slots, -1)
    run(kv_c, k_pe, cache, near, k_scale)


def grid_of_rows(run: Any, kv_c: Any, k_pe: Any, cache: Tensor, slots: Tensor, k_scale: Any) -> None:
    run(kv_c[:65535], k_pe[:65535], cache, slots[:65535], k_scale)


DECODED = "large_offsets:call=decode;dims=small;heads=1;q=[1,2];kv=[200,70];far=cache31"
MANY = "many_rows:call=write_latent;dims=16-8-16-32;q=[65537];kv=[9];page=16"
WRITTEN = "large_offsets:call=write_latent;dims=16-8-16-32;q=[5,1,30];kv=[40,0,20];page=16;far=cache31"
FAR: list[tuple[type, str, Callable[..., Any], str]] = [
    (EagerDecodeBackend, "run_decode", lambda run, ql, q, cache, scale: run(ql, q, found_by(cache), scale), DECODED),
    (EagerIndexerBackend, "run_index_logits", far_scales, "call=index_logits;heads=2;q=[2,1];kv=[200,70];far=cache31"),
    (
        EagerTopKBackend, "run_top_k_per_row", lambda run, logits, topk: run(found_by(logits), topk),
        "call=select;q=[1x6];kv=[300,70,5,90,200,40];far=q31;topk=16",
    ),
    (EagerCacheBackend, "run_write_latent", far_slots, WRITTEN),
    (EagerCacheBackend, "run_write_latent", grid_of_rows, MANY),
]  # fmt: skip


@pytest.mark.parametrize(("base", "method", "step", "case"), FAR)
def test_offsets_of_32_bits_and_grids_that_end_are_found(base: type, method: str, step: Any, case: str) -> None:
    record = judged(changed(base, **{method: step}), case if ":" in case else f"large_offsets:{case}", Context())
    assert record.status is Status.FAIL, record.message


def test_what_reaches_far_takes_no_memory_and_a_right_kernel_passes() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in LARGE[-19:]:
        record = judged("EAGER", case, Context())
        assert record.status is Status.PASS, (case, record.message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # 256 MiB
