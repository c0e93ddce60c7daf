"""The adapter of vLLM's Triton decode kernel against a stand-in that follows its source."""

import math
import sys
from typing import Any

import pytest
import torch

from mla_conformance.backends.triton_mla import (
    TritonMLADecodeBackend,
    TritonMLAFloat32Lse,
    key_splits,
)

_MODULE = "vllm.v1.attention.ops.triton_decode_attention"
_FUNCTION = "vllm/v1/attention/ops/triton_decode_attention.py:decode_attention_fwd"


@pytest.fixture
def calls(recorded: Any, installed: Any, mla_kernel: Any) -> Any:
    """The arguments of each call. A row of q is a request of one token, NaN without keys."""
    seen: list[Any] = []

    def call(a: Any) -> None:
        seen.append(dict(a))
        q, cache, page = a["q"], a["k_buffer"], a["page_size"]
        assert (cache.shape[1:], a["v_buffer"].shape[1:]) == ((page, 1, 576), (page, 1, 512))
        assert a["v_buffer"].data_ptr() == cache.data_ptr() and a["is_mla"]
        assert a["attn_logits"].shape == (*q.shape[:2], a["num_kv_splits"], 513)
        assert a["k_scale"] is a["v_scale"]
        lengths = a["b_seq_len"].tolist()
        output, lse = mla_kernel(q, cache[:, :, 0], lengths, [1] * len(q), a["req_to_token"], a["sm_scale"])
        output[lse[0] == -math.inf] = math.nan
        a["o"].copy_(output)
        a["lse"].copy_(lse.mT)

    installed(_MODULE, decode_attention_fwd=recorded("vllm 0.33.0", _FUNCTION, call))
    return seen


@pytest.mark.parametrize(("queries", "lengths"), [((1, 1, 1), (65, 0, 130)), ((3, 3), (64, 129))])
def test_conventions(queries: Any, lengths: Any, calls: Any, decodes: Any) -> None:
    decodes(TritonMLAFloat32Lse, 32, queries, lengths)


def test_a_token_of_several_sees_the_keys_up_to_its_own(calls: Any, decodes: Any) -> None:
    decodes(TritonMLAFloat32Lse, 16, (3, 3), (40, 5))
    assert calls[0]["b_seq_len"].tolist() == [38, 39, 40, 3, 4, 5]


def test_the_lse_is_as_coarse_as_vllm_makes_it(calls: Any, decodes: Any) -> None:
    with pytest.raises(AssertionError):
        decodes(TritonMLADecodeBackend, 16, (1,), (40,))
    assert calls[0]["lse"].dtype == torch.bfloat16


@pytest.mark.parametrize(("length", "splits"), [(1, 1), (1023, 1), (1024, 2), (1536, 4), (10**6, 264)])
def test_keys_are_split_as_in_vllm(length: Any, splits: Any) -> None:
    assert key_splits(length, compute_units=132) == splits


def test_a_vllm_without_its_compiled_extension_says_what_is_missing(tmp_path: Any, monkeypatch: Any) -> None:
    module = tmp_path.joinpath(*_MODULE.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    for package in list(module.relative_to(tmp_path).parents)[:-1]:
        (tmp_path / package / "__init__.py").touch()
    module.write_text("import vllm._C_stable_libtorch")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    assert TritonMLADecodeBackend.missing_dependencies() == []
    (reason,) = TritonMLADecodeBackend.broken_dependencies()
    assert "vllm is installed" in reason and "No module named 'vllm._C_stable_libtorch'" in reason
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
