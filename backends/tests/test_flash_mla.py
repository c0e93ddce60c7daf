"""The adapter against a stand-in that follows FlashMLA's documentation."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.flash_mla import FlashMLADecodeBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.platform import DeviceCapability

_LABEL, _FILE = "flash-mla 1.0.0+9241ae3", "flash_mla/flash_mla_interface.py"


@pytest.fixture
def library(recorded: Any, installed: Any, mla_kernel: Any) -> Any:
    """Queries [B, S, N, L + R], pages of 64; LSE [B, N, S], +inf and garbage in a row without keys."""

    def call(a: Any) -> Any:
        q, cache = a["q"], a["k_cache"]
        assert a["num_splits"] is None and a["tile_scheduler_metadata"] == "schedule" and a["head_dim_v"] == 512
        assert cache.shape[1:] == (64, 1, 576)
        lengths = a["cache_seqlens"].tolist()
        tables = [row[: -(-n // 64)].tolist() for row, n in zip(a["block_table"], lengths, strict=True)]
        requests, queries = q.shape[:2]
        assert a["causal"] == (queries > 1)
        sizes = [queries] * requests
        output, lse = mla_kernel(q.flatten(0, 1), cache[:, :, 0], lengths, sizes, tables, a["softmax_scale"])
        empty = lse[0] == -math.inf
        output[empty], lse[:, empty] = math.nan, math.inf
        return output.unflatten(0, (requests, queries)), lse.unflatten(1, (requests, queries)).transpose(0, 1)

    return installed(
        "flash_mla",
        get_mla_metadata=recorded(_LABEL, f"{_FILE}:get_mla_metadata", lambda a: ("schedule", None)),
        flash_mla_with_kvcache=recorded(_LABEL, f"{_FILE}:flash_mla_with_kvcache", call),
    )


@pytest.mark.parametrize(("queries", "lengths"), [((1, 1, 1), (65, 0, 130)), ((3, 3), (64, 129))])
def test_conventions(queries: Any, lengths: Any, library: Any, decodes: Any) -> None:
    decodes(FlashMLADecodeBackend, 64, queries, lengths)


def test_batches_that_are_not_uniform_are_refused(library: Any, decodes: Any) -> None:
    with pytest.raises(UnsupportedConfiguration, match=r"different numbers of query tokens"):
        decodes(FlashMLADecodeBackend, 64, (1, 2), (65, 130))


def test_says_what_it_does_not_do(monkeypatch: Any) -> None:
    monkeypatch.setattr(FlashMLADecodeBackend, "libraries", ())
    config = MLADecodeSelectorConfig(torch.bfloat16, "fp8", 16, 512, 64, max_query_len=2, uniform=False)
    reasons = FlashMLADecodeBackend.validate_configuration(DeviceCapability(9, 0), config)
    assert [reason.split()[0] for reason in reasons] == ["kv_cache_dtype", "block_size", "requests"]
    assert not FlashMLADecodeBackend.supports_compute_capability(DeviceCapability(10, 0))


def test_says_how_to_build_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("mla_conformance.backends.dependencies._installed", lambda module: False)
    (reason,) = FlashMLADecodeBackend.missing_dependencies()
    assert "git+https://github.com/deepseek-ai/FlashMLA" in reason and "PyPI lacks its headers" in reason
