"""Judging a whole layer: the honest one passes, and each kind of wrong byte, weight and configuration is found."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends import eager, eager_decode
from mla_conformance.backends.layer import mla_impl, mla_layer
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.judging.record import Check, Status
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.reference.cache_layout import encode
from mla_conformance.roles.definition import build_problem
from mla_conformance.roles.layer.call import Layer
from mla_conformance.tests.drawn import CPU, changed, judged

EAGER = "mla_conformance.defects.bases:EagerLayer"
WRITES = "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1"


def looks_away(prepare: Any, *operands: Any, **options: Any) -> None:
    with suppress(ValueError):
        prepare(*operands, **options)


def asserts(prepare: Any, *operands: Any, **options: Any) -> None:
    try:
        prepare(*operands, **options)
    except ValueError as error:
        raise AssertionError from error


class SilentSecond(EagerLayer):
    class impl_class(mla_impl.MLACommonImpl):
        def do_kv_cache_update(self, *operands: Any) -> None:
            if self.dcp_rank != 1:
                super().do_kv_cache_update(*operands)


class Uniform(eager_decode.EagerDecodeBackend):
    supports_nonuniform_queries = False
    returns_lse = False

    def run_decode(self, *operands: Any) -> Any:
        return super().run_decode(*operands)[0]


class WithoutLse(eager.EagerPrefillBackend):
    returns_lse = False

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, return_softmax_lse: bool, *rest: Any) -> Any:
        assert not return_softmax_lse
        return super().run_prefill_new_tokens(q, k, v, False, *rest)


class Composed(EagerLayer):
    prefill_backend, decode_backend = WithoutLse, Uniform


class Present(EagerLayer):
    @classmethod
    def get_builder_cls(cls) -> Any:
        return lambda *settings: SimpleNamespace(build=EagerLayer.get_builder_cls()(*settings).build)


def test_either_code_of_a_tie_is_right() -> None:
    problem: Any = build_problem(Case.parse(f"{WRITES};cache=fp8;kscale=1000000"), CPU)
    image = problem.calls[0].image
    kv_c, k_pe = (torch.full_like(x, 1.0625) for x in image.latents)
    image = replace(image, latents=(kv_c, k_pe))
    codes = encode(kv_c, k_pe, "fp8", 1.0)
    image.cache[image.slots // 16, image.slots % 16] = codes
    image.after.copy_(storage_bytes(image.cache))
    image.cache.view(torch.uint8)[image.slots // 16, image.slots % 16] = codes.view(torch.uint8) + 1
    assert codes.float().unique().tolist() == [1.0] and image.difference() == ""


REPLAYS = "graph_replay:call=layer;dims=32-16-32-64;heads=2;q=[1x4];kv=[33,70,1,64];cache=fp8;decodes=4"


def test_a_batch_larger_than_captured_must_be_refused_in_whatever_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for step in (looks_away, asserts):
        state = changed(mla_layer.MLACommonState, prepare_graph_input_buffers=step)
        monkeypatch.setattr(EagerLayer, "get_state_cls", staticmethod(lambda state=state: state))
        found.append(judged(EagerLayer, REPLAYS))
    taken, refused = found
    assert (taken.status, taken.check) == (Status.FAIL, Check.UNSAFE_REFUSAL)
    assert taken.message.startswith("one request more than captured: it was loaded into the graph's buffers")
    assert refused.status is Status.PASS, refused.message


def test_what_one_rank_does_not_write_is_told_and_a_builder_without_requests_is_judged_with_decodes_first() -> None:
    written = judged(SilentSecond, "layer_dcp:call=layer;dims=32-16-32-64;heads=2;q=[5];kv=[12];ranks=2")
    assert written.message.startswith("layer on 2 ranks: on rank 1, the entry of slot ")
    first = judged(Present, WRITES)
    assert (first.status, first.message) == (Status.UNSUPPORTED, "its builder takes no requests, prefills first")
    other = WRITES.replace("q=[5,1];kv=[12,15]", "q=[1,5];kv=[15,12];order=decodes_first")
    found = judged(Present, other)
    assert found.status is Status.PASS, found.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("q=[5,9];kv=[40,0]", "prefill: LSE not declared, by which contexts are merged"),
        ("heads=2;q=[1];kv=[15];decodes=1;ranks=2", "decode: LSE not declared"),
        ("q=[5,2];kv=[0,9];decodes=2;pad=3", "decode: requests with different numbers of query tokens not supported"),
        ("heads=2;q=[5,1];kv=[0,15];decodes=1;pad=2", ""),  # nothing is merged
    ],
)
def test_what_a_layer_cannot_be_driven_with_is_unsupported(fields: str, said: str) -> None:
    found = judged(Composed, f"cache_write:call=layer;dims=32-16-32-64;{fields}")
    assert found.status is (Status.UNSUPPORTED if said else Status.PASS) and found.message.endswith(said)


def test_a_captured_layer_has_its_scales_from_before_where_a_graph_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the host, from where a GPU copies nothing during a capture."""
    case: Any = Case.parse(REPLAYS)
    layer = Layer(EagerLayer, case, torch.bfloat16, CPU)
    assert layer.attention_layer(case)._k_scale is layer.attention_layer(replace(case, seed=1))._k_scale

    def capturing(device: torch.device, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        def replay() -> Any:
            with monkeypatch.context() as during:
                during.setattr(Layer, "attention_layer", None)
                return call()

        return replay, replay()

    monkeypatch.setattr("mla_conformance.trials.layers.captured", capturing)
    assert judged(EAGER, REPLAYS).status is Status.PASS


class LastChunkTwice(EagerLayer):
    class impl_class(mla_impl.MLACommonImpl):
        def _gather(self, index: int, kv_cache: Any, attn_metadata: Any, k_scale: Any) -> None:
            tokens = attn_metadata.prefill_metadata.chunked_context.seq_tot
            super()._gather(index - (index == len(tokens) - 1), kv_cache, attn_metadata, k_scale)


@pytest.mark.parametrize(("dtype", "chunks", "least"), [("bf16", 16, 4.0), ("fp16", 64, 4.0), ("bf16", 64, 1.0)])
def test_a_last_chunk_that_is_the_one_before_it_is_wrong(dtype: str, chunks: int, least: float) -> None:
    """Merges weigh in a budget by the share of the result that they round."""
    batch = f"dims=32-16-32-64;heads=2;q=[9];kv=[{64 * chunks}];page=16;workspace=64"
    case = f"mixed_batch:call=layer;dtype={dtype};{batch}"
    records = [judged(kernel, case) for kernel in (LastChunkTwice, "EAGER")]
    assert [record.status for record in records] == [Status.FAIL, Status.PASS]
    most = [max(map(float, record.used.values())) for record in records]
    assert most[0] > least and most[1] < 0.5
