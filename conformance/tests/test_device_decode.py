"""The device capabilities' procedures on decode backends, as far as a CPU shows them."""

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.cases.case import Case
from mla_conformance.judging.needs import Reach
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CONTEXT = Context()
_KV = "kv=[200,64,30,129,17,100,40,5];page=16"
GRAPHS = [
    f"cuda_graph:call=decode;dims=small;heads=2;q=[1x8];{_KV}",
    "cuda_graph:call=decode;dims=small;heads=2;q=[4x6];kv=[200,64,30,129,17,100];page=16;data=needle",
]


class Capturable(EagerDecodeBackend):
    """EAGER, said to be capturable; without a GPU a replay is a call."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class SingleTokens(Capturable):
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class LengthsOfTheCapture(Capturable):
    def prepare_metadata(self, decode_metadata: Any) -> None:
        lengths = decode_metadata.seq_lens
        kept = self.__dict__.setdefault("kept", {}).setdefault(len(lengths), lengths.clone())
        super().prepare_metadata(replace(decode_metadata, seq_lens=kept))


class TableOfTheCapture(Capturable):
    def prepare_metadata(self, decode_metadata: Any) -> None:
        table = decode_metadata.block_table
        kept = self.__dict__.setdefault("kept", {}).setdefault(table.shape, table.clone())
        super().prepare_metadata(replace(decode_metadata, block_table=kept))


class WrapsAround(EagerDecodeBackend):
    """Reads what lies beyond 2^16 elements of the cache from where it is modulo that."""

    def run_decode(self, ql_nope: Any, q_pe: Any, kv_cache: Any, k_scale: Any) -> Any:
        if kv_cache.stride(0) * (len(kv_cache) - 1) > 2**16:
            kv_cache = kv_cache[
                [block * kv_cache.stride(0) % 2**16 // kv_cache.stride(0) for block in range(len(kv_cache))]
            ]
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


def judged(backend: type, case: str) -> Record:
    location = f"{inspect.getfile(backend)}:{backend.__name__}"
    return judge_one(Subject.of(location, torch.device("cpu")), Case.parse(case), CONTEXT)


@pytest.mark.parametrize("case", GRAPHS)
def test_a_capturable_backend_passes(case: str) -> None:
    assert judged(Capturable, case).status is Status.PASS


@pytest.mark.parametrize("case", GRAPHS)
@pytest.mark.parametrize("backend", [LengthsOfTheCapture, TableOfTheCapture])
def test_what_a_capture_froze_is_found(backend: type, case: str) -> None:
    found = judged(backend, case)
    assert found.status is Status.FAIL
    assert "replayed" in found.message


def test_a_graph_of_several_tokens_must_be_declared() -> None:
    assert judged(SingleTokens, GRAPHS[0]).status is Status.PASS
    found = judged(SingleTokens, GRAPHS[1])
    assert (found.status, "needed UNIFORM_BATCH" in found.message) == (Status.UNSUPPORTED, True)


def test_far_blocks_are_judged(monkeypatch: Any) -> None:
    monkeypatch.setattr(Reach, "of", staticmethod(lambda case: Reach("cache", 2**16)))
    monkeypatch.setattr("mla_conformance.trials.subject.device_reasons", lambda *_: [])
    case = "large_offsets:call=decode;dims=small;heads=2;q=[1,1];kv=[200,70];far=cache31"
    assert judged(EagerDecodeBackend, case).status is Status.PASS
    found = judged(WrapsAround, case)
    assert (found.status, found.check in (Check.LSE, Check.MASK)) == (Status.FAIL, True)
