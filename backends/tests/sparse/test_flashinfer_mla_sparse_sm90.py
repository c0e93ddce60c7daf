"""The adapter against a stand-in of FlashInfer's paged wrapper over pages of one token."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.flashinfer_mla_sparse_sm90 import FlashInferMLASparseSM90Backend

_LABEL, _FOLDER = "flashinfer-python 0.7.2.post1", "flashinfer/mla/_batch_mla"
_WRAPPER = f"{_FOLDER}/_wrapper.py:BatchMLAPagedAttentionWrapper"
_BATCH = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


@pytest.fixture
def library(recorded: Any, installed: Any, sparse_kernel: Any) -> None:
    """A wrapper that is planned on the host for what it runs; natural LSE [T, N], -inf without keys."""

    def run(wrapper: Any, a: Any) -> Any:
        plan = wrapper.planned
        q, rows = (torch.cat(a[name], dim=-1) for name in ("query", "kv_cache"))
        assert (plan["query_layout"], plan["kv_cache_layout"], plan["lse_mode"]) == ("split", "split", "basee")
        assert a["return_lse"] and a["return_lse_base_on_e"] and rows.shape[1] == plan["page_size"] == 1
        assert not plan["causal"]
        scaled = rows.dtype == torch.float8_e4m3fn
        assert plan["scale_mode"] == ("kv-per-tensor" if scaled else "default")
        assert a["ckv_scale"] == a["kpe_scale"] and (a["ckv_scale"] is not None) == scaled
        keys = rows[:, 0].double() * (a["ckv_scale"] if scaled else 1.0)
        starts, slots = plan["metadata"]["kv_indptr"].tolist(), plan["metadata"]["kv_indices"]
        assert bool((slots >= 0).all()) and plan["metadata"]["qo_indptr"].tolist() == [*range(len(q) + 1)]
        named = [slots[begin:end].long() for begin, end in pairwise(starts)]
        assert plan["metadata"]["kv_len_arr"].tolist() == [*map(len, named)]
        lists = torch.nn.utils.rnn.pad_sequence(named, batch_first=True, padding_value=-1)
        return sparse_kernel(q, keys, lists, plan["sm_scale"])

    def keep(a: Any) -> None:
        assert all(a["metadata"][name].dtype == torch.int32 for name in _BATCH)
        a["self"].planned = dict(a)

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            recorded(_LABEL, f"{_WRAPPER}.__init__", self._begin)(self, *args, **kwargs)
            self.run = recorded(_LABEL, f"{_WRAPPER}.run", lambda a: run(self, a)).__get__(self)
            self.plan = recorded(_LABEL, f"{_WRAPPER}.plan", keep).__get__(self)

        def _begin(self, a: Any) -> None:
            assert a["backend"] == "fa3" and a["float_workspace_buffer"].numel() >= 128 << 20

    csr = recorded(_LABEL, f"{_FOLDER}/_contracts.py:MLAPlanMetadata.csr", dict)
    metadata = SimpleNamespace(csr=lambda **fields: csr(None, **fields))
    installed("flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=metadata)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "asked",
    [
        {"layout": "auto", "page": 16, "heads": 2, "topk": 63, "length": True},
        {"layout": "auto", "heads": 2, "rope": 0, "dtype": torch.float16},
        {"layout": "fp8", "heads": 2},
        {"layout": None, "heads": 2, "topk": 1},
    ],
)
def test_conventions(asked: Any, selects: Any) -> None:
    selects(FlashInferMLASparseSM90Backend, **asked)


@pytest.mark.usefixtures("library")
def test_a_call_is_planned_for_its_own_lists(selects: Any) -> None:
    backend = selects(FlashInferMLASparseSM90Backend, "auto", heads=2)
    wrapper = backend._wrapper
    q, cache = torch.zeros(1, 2, 576).bfloat16(), torch.zeros(4, 1, 576).bfloat16()
    backend._sparse_metadata.query_lens_cpu = torch.ones(1, dtype=torch.int32)
    backend.run_sparse_prefill(q, cache, torch.tensor([[3, -1, 2]], dtype=torch.int32), False)
    assert backend._wrapper is wrapper and wrapper.planned["metadata"]["kv_indices"].tolist() == [3, 2]


def test_a_version_before_the_metadata_object_says_so(installed: Any, monkeypatch: Any) -> None:
    installed("flashinfer.mla", BatchMLAPagedAttentionWrapper=None)
    monkeypatch.setattr(FlashInferMLASparseSM90Backend, "libraries", FlashInferMLASparseSM90Backend.libraries[:1])
    (reason,) = FlashInferMLASparseSM90Backend.broken_dependencies()
    assert reason.startswith("needs flashinfer-python 0.7 or newer, not ")
