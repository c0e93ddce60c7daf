"""The adapter against a stand-in that follows FlashMLA's documentation and the limits of its kernels for Hopper."""

import math
import re
from typing import Any

import pytest
import torch

from mla_conformance.backends.flash_mla_sparse import FlashMLASparseBackend, FlashMLASparseFloat32Scales
from mla_conformance.backends.kernel import UnsupportedConfiguration

_LABEL, _FILE = "sgl-flash-mla 1.0.0", "flash_mla/flash_mla_interface.py"
_LAYOUTS = {656: "fp8_ds_mla", 584: "fp8_v4"}


@pytest.fixture
def library(recorded: Any, installed: Any, sparse_kernel: Any, slots_of: Any) -> None:
    """64 or 128 heads; natural LSE, +inf without keys. A request has one query token, its list and its length."""

    def cut(lists: Any, length: Any) -> Any:
        """What a kernel looks at: nothing from the length on."""
        if length is None:
            return lists.long()
        assert length.dtype == torch.int32 and length.is_contiguous()
        return lists.long().masked_fill(torch.arange(lists.shape[1]) >= length[:, None], -1)

    def source(cache: Any, indices: Any, length: Any) -> Any:
        assert (
            indices.shape[1] == 1
            and indices.shape[2] % 64 == 0
            and cache.shape[2] == 1
            and cache.stride(1) == cache.shape[3]
        )
        return slots_of(cache[:, :, 0], _LAYOUTS[cache.shape[3]]), cut(indices[:, 0], length)

    def decode(a: Any) -> Any:
        q, cache = a["q"], a["k_cache"]
        assert a["use_legacy"] and a["tile_scheduler_metadata"] == "schedule" and not a["causal"]
        assert q.shape[1] == 1 and q.shape[2] in (64, 128) and a["head_dim_v"] == 512
        assert (q.shape[3], cache.shape[3]) in ((576, 656), (512, 584))
        keys, lists = source(cache, a["indices"], a["topk_length"])
        if cache.shape[3] == 656:
            assert a["topk_length"] is None and a["extra_k_cache"] is None
        if a["extra_k_cache"] is not None:
            more, others = source(a["extra_k_cache"], a["extra_indices_in_kvcache"], a["extra_topk_length"])
            lists = torch.cat((lists, torch.where(others < 0, -1, others + len(keys))), dim=1)
            keys = torch.cat((keys, more))
        output, lse = sparse_kernel(q[:, 0], keys, lists, a["softmax_scale"], a["attn_sink"])
        return output[:, None], lse.masked_fill(lse == -math.inf, math.inf)[:, :, None]

    def prefill(a: Any) -> Any:
        q, kv, indices = a["q"], a["kv"], a["indices"]
        assert a["use_legacy"] and a["d_v"] == 512 and q.shape[1] in (64, 128) and kv.shape[1] == 1
        assert indices.shape[1] == 1 and indices.shape[2] % 128 == 0
        lists = cut(indices[:, 0], a["topk_length"])
        output, lse = sparse_kernel(q, kv[:, 0], lists, a["sm_scale"], a["attn_sink"])
        return output, lse, lse.masked_fill(lse == -math.inf, math.inf)

    installed(
        "flash_mla",
        has_legacy=lambda: True,
        get_mla_metadata=recorded(_LABEL, f"{_FILE}:get_mla_metadata", lambda a: ("schedule", None)),
        flash_mla_with_kvcache=recorded(_LABEL, f"{_FILE}:flash_mla_with_kvcache", decode),
        flash_mla_sparse_fwd=recorded(_LABEL, f"{_FILE}:flash_mla_sparse_fwd", prefill),
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "asked",
    [
        {"layout": "fp8_ds_mla", "topk": 64, "sink": True},
        {"layout": "fp8_v4", "rope": 0, "length": True, "heads": 128},
        {"layout": "fp8_v4", "rope": 0, "page": 6, "extra": True, "sink": True, "length": True},
        {"layout": None, "length": True, "sink": True},
        {"layout": None, "rope": 0, "heads": 128},
    ],
)
def test_conventions(asked: Any, selects: Any) -> None:
    selects(FlashMLASparseBackend, **asked)


@pytest.mark.usefixtures("library")
def test_any_scales_are_read_by_the_same_call(selects: Any) -> None:
    selects(FlashMLASparseFloat32Scales, "fp8_ds_mla", topk=64, sink=True)


@pytest.mark.usefixtures("library")
def test_refuses_what_it_does_not_take_before_it_calls(selects: Any) -> None:
    with pytest.raises(UnsupportedConfiguration, match="topk_length of lists over fp8_ds_mla"):
        selects(FlashMLASparseBackend, "fp8_ds_mla", length=True)


@pytest.mark.usefixtures("library")
def test_a_build_with_these_kernels_is_whole() -> None:
    assert FlashMLASparseBackend.broken_dependencies() == []


@pytest.mark.parametrize(
    ("parameter", "said"),
    [("use_legacy", "sgl-flash-mla .* built without its legacy kernels"), ("causal", "drives sgl-flash-mla")],
)
def test_a_build_without_them_says_so(parameter: str, said: str, installed: Any) -> None:
    functions: dict[str, Any] = {"use_legacy": lambda q, use_legacy: None, "causal": lambda q, causal: None}
    installed("flash_mla", flash_mla_with_kvcache=functions[parameter], has_legacy=lambda: False)
    (reason,) = FlashMLASparseBackend.broken_dependencies()
    assert re.search(said + r".*pip install 'mla-conformance\[flashmla\]'", reason)
