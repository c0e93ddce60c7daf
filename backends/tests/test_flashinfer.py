"""The ragged wrapper's adapter against stand-ins that follow FlashInfer before and after ``lse_base``."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.flashinfer import FlashInferPrefillBackend
from mla_conformance.backends.platform import DeviceCapability

_FILE = "flashinfer/prefill.py:BatchPrefillWithRaggedKVCacheWrapper"
_VERSIONS = ["flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"]


@pytest.fixture(params=_VERSIONS)
def wrappers(request: Any, recorded: Any, installed: Any, kernel: Any) -> Any:
    """Wrappers that were made, of a library that answers to base 2, [T, N], unless it is asked for another form."""
    made = []

    def run(wrapper: Any, a: Any) -> Any:
        plan = wrapper.planned
        assert a["q"].shape[0] == int(plan["qo_indptr"][-1])
        starts = (plan["qo_indptr"], plan["kv_indptr"])
        assert (plan["head_dim_qk"], plan["head_dim_vo"]) == (a["q"].shape[-1], a["v"].shape[-1])
        output, lse = kernel(a["q"], a["k"], a["v"], *starts, plan["sm_scale"], plan["causal"])
        assert plan["o_data_type"] == output.dtype
        if plan["q_data_type"] == torch.float8_e4m3fn:
            assert plan["head_dim_qk"] == plan["head_dim_vo"]
            scales = [(scale.dtype, scale.tolist()) for scale in a["args"]]
            assert scales == [(torch.float32, [1.0] * output.shape[1])] * 3
        lse = lse.clamp(min=-50000.0) if request.param.endswith("0.6.13") else lse
        lse = lse if a.get("lse_base") == "ln" else lse / math.log(2)
        lse = lse if a.get("lse_layout") == "HN" else lse.mT.contiguous()
        return output if a["out"] is None else a["out"].copy_(output), lse

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            recorded(request.param, f"{_FILE}.__init__", lambda a: made.append(self))(self, *args, **kwargs)
            self.run = recorded(request.param, f"{_FILE}.run", lambda a: run(self, a)).__get__(self)

        def plan(self, *args: Any, **kwargs: Any) -> None:
            def keep(a: Any) -> None:
                self.planned = dict(a)

            recorded(request.param, f"{_FILE}.plan", keep)(self, *args, **kwargs)

    Wrapper.run = None
    library = installed("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    library.bound = lambda wrapper: wrapper
    return made


@pytest.mark.parametrize("variant", FlashInferPrefillBackend.variants)
def test_conventions(variant: Any, wrappers: Any, conforms: Any, monkeypatch: Any) -> None:
    backend = FlashInferPrefillBackend.variants[variant]
    conforms(backend)
    assert {w.planned["q_data_type"] for w in wrappers} == {torch.bfloat16}
    assert {(w.planned["head_dim_qk"], w.planned["head_dim_vo"]) for w in wrappers} == {(192, 128)}


def test_operands_in_e4m3_have_one_head_dim_and_scales(wrappers: Any, conforms: Any) -> None:
    conforms(FlashInferPrefillBackend.variants["fa3"], dtype=torch.float8_e4m3fn)
    assert {w.planned["head_dim_qk"] for w in wrappers} == {256}


def test_plans_once_for_each_batch(wrappers: Any, conforms: Any) -> None:
    conforms(FlashInferPrefillBackend.variants["fa2"])
    assert len(wrappers) == 2  # the new tokens, called twice, and the context chunk of the next batch


def test_choice_by_device(monkeypatch: Any) -> None:
    monkeypatch.setattr(FlashInferPrefillBackend, "libraries", ())
    chosen: list[Any] = [
        FlashInferPrefillBackend.resolve(DeviceCapability(*c)) for c in ((8, 0), (9, 0), (10, 0), (12, 0))
    ]
    assert [backend.variant for backend in chosen] == ["fa2", "fa3", "cutlass", "fa2"]
