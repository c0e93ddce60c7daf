"""The adapter of vLLM's paged Triton kernel against a stand-in that follows its source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.metadata import prefill_metadata
from mla_conformance.backends.triton_attn import TritonAttnPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.reference.dimensions import MLADimensions
from mla_conformance.trials.subject import Subject

_FUNCTION = "vllm/v1/attention/ops/triton_unified_attention.py:unified_attention"
LENGTHS, SCALE = (3, 0, 33), 0.11


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


@pytest.fixture
def backend() -> Any:
    made = TritonAttnPrefillBackend(2, SCALE, 512, 128, 64, 128, None)
    device, table = torch.device("cpu"), torch.zeros(3, 1, dtype=torch.int32)
    made.prepare_metadata(prefill_metadata(LENGTHS, block_table=table, dtype=torch.bfloat16, device=device))
    return made


def _operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(37, 2, width, generator=generator).bfloat16() for width in (192, 192, 128)]


@pytest.mark.parametrize("scale", [None, 0.013])
def test_conventions(scale: Any, library: Any, backend: Any, kernel: Any) -> None:
    q, k, v = _operands()
    start = torch.tensor([0, 3, 3, 36])
    want, _ = kernel(q[:36], k[:36], v[:36], start, start, SCALE, True)
    out = None if scale is None else torch.empty(37, 2, 128, dtype=torch.float8_e4m3fn)
    result = backend.run_prefill_new_tokens(q, k, v, False, out, None if scale is None else torch.tensor(scale))
    assert (result.shape, result.dtype) == ((37, 2, 128), torch.bfloat16 if out is None else out.dtype)
    assert out is None or result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(result[:36].float() * (scale or 1.0), want.float(), atol=0.02, rtol=2.0**-4)
    assert bool((result[36:].float() == 0).all())


def test_what_needs_an_lse_is_refused(library: Any, backend: Any) -> None:
    q, k, v = _operands()
    with pytest.raises(UnsupportedConfiguration, match="LSE"):
        backend.run_prefill_new_tokens(q, k, v, True)
    with pytest.raises(UnsupportedConfiguration, match="LSE"):
        backend.run_prefill_context_chunk(0, q, k, v)


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
