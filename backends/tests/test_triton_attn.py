"""The adapter of vLLM's paged Triton kernel against a stand-in that follows its source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.triton_attn import TritonAttnPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.reference.dimensions import MLADimensions
from mla_conformance.trials.subject import Subject

_FUNCTION = "vllm/v1/attention/ops/triton_unified_attention.py:unified_attention"


@pytest.fixture
def library(recorded: Any, installed: Any, kernel: Any) -> None:
    """Keys and values of pages of 16, equally wide; the output scaled by the reciprocal."""

    def call(a: Any) -> None:
        k, v, lengths = a["k"], a["v"], a["seqused_k"].tolist()
        assert k.shape == v.shape and k.shape[1] == 16 and a["causal"] and a["window_size"] == (-1, -1)
        assert (a["max_seqlen_q"], a["max_seqlen_k"], a["softcap"]) == (max(lengths), max(lengths), 0)
        rows = [x[table].flatten(0, 1)[:n] for x in (k, v) for table, n in zip(a["block_table"], lengths, strict=True)]
        keys, values = (torch.cat(part) for part in (rows[: len(lengths)], rows[len(lengths) :]))
        start = a["cu_seqlens_q"]
        output, _ = kernel(a["q"], keys, values, start, start, a["softmax_scale"], True)
        scale = 1.0 if a["output_scale"] is None else a["output_scale"]
        a["out"].copy_((output.float() / scale).clamp(-448, 448))

    call = recorded("vllm 0.33.0", _FUNCTION, call)
    installed("vllm.v1.attention.ops.triton_unified_attention", unified_attention=call)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("scale", [None, 0.013])
def test_conventions(scale: Any, serves_new_tokens: Any) -> None:
    serves_new_tokens(TritonAttnPrefillBackend, 128, 128, out=scale is not None, scale=scale)


def test_v_may_be_narrower_than_k_and_not_wider() -> None:
    dims = [MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=v) for v in (128, 192, 256)]
    assert [TritonAttnPrefillBackend.supports_mla_dimensions(d) for d in dims] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"q": (9,), "lse": False}, []),
        ({"q": (9,)}, ["LSE not declared"]),
        ({"call": "context_chunk", "q": (9,), "kv": (20,)}, ["LSE not declared"]),
    ],
)
def test_cases_that_need_an_lse_are_unsupported(fields: Any, said: Any, library: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(TritonAttnPrefillBackend, "supports_compute_capability", lambda device_capability: True)
    subject = Subject.of("TRITON_ATTN", torch.device("cpu"))
    assert subject.unsupported(Case.of(capability="new_tokens", **fields)) == said
