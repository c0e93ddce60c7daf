"""The adapter against a stand-in that follows FlashMLA's documentation."""

import math
import re
from typing import Any

import pytest

from mla_conformance.backends.flash_mla import FlashMLADecodeBackend

_FILE = "flash_mla/flash_mla_interface.py"
_FORK, _DEEPSEEK = "sgl-flash-mla 1.0.0", "flash-mla 1.0.0+9241ae3"


@pytest.fixture(params=[_FORK, _DEEPSEEK])
def library(request: Any, recorded: Any, installed: Any, mla_kernel: Any) -> Any:
    """Queries [B, S, N, L + R], pages of 64; LSE [B, N, S], +inf and garbage in a row without keys."""
    label = request.param

    def call(a: Any) -> Any:
        q, cache = a["q"], a["k_cache"]
        assert a.get("use_legacy") is (True if label == _FORK else None)
        assert a["num_splits"] is None and a["tile_scheduler_metadata"] == "schedule" and a["head_dim_v"] == 512
        assert cache.shape[1:] == (64, 1, 576)
        lengths = a["cache_seqlens"].tolist()
        requests, queries = q.shape[:2]
        assert a["causal"] == (queries > 1)
        sizes = [queries] * requests
        output, lse = mla_kernel(q.flatten(0, 1), cache[:, :, 0], lengths, sizes, a["block_table"], a["softmax_scale"])
        empty = lse[0] == -math.inf
        output[empty], lse[:, empty] = math.nan, math.inf
        return output.unflatten(0, (requests, queries)), lse.unflatten(1, (requests, queries)).transpose(0, 1)

    return installed(
        "flash_mla",
        has_legacy=lambda: True,
        get_mla_metadata=recorded(label, f"{_FILE}:get_mla_metadata", lambda a: ("schedule", None)),
        flash_mla_with_kvcache=recorded(label, f"{_FILE}:flash_mla_with_kvcache", call),
    )


@pytest.mark.parametrize(("queries", "lengths"), [((1, 1, 1), (65, 0, 130)), ((3, 3), (64, 129))])
def test_conventions(queries: Any, lengths: Any, library: Any, decodes: Any) -> None:
    decodes(FlashMLADecodeBackend, 64, queries, lengths)


def test_says_which_build_served(library: Any, decodes: Any) -> None:
    evidence = decodes(FlashMLADecodeBackend, 64, (1, 1), (65, 3)).kernel_evidence()
    assert FlashMLADecodeBackend.broken_dependencies() == []
    assert list(evidence) in (["sgl-flash-mla", "kernels"], ["flash-mla"])


def _sparse(q: Any, k_cache: Any, is_fp8_kvcache: bool = True) -> None: ...


def _dense(q: Any, k_cache: Any, is_fp8_kvcache: bool = False) -> None: ...


def _fork(q: Any, k_cache: Any, is_fp8_kvcache: Any = None, use_legacy: bool = False) -> None: ...


def _schedule(*args: Any) -> None: ...


def _schedule_of_lengths(cache_seqlens: Any, num_heads_k: int) -> None: ...


@pytest.mark.parametrize(
    ("decode", "schedule", "said"),
    [
        (_sparse, _schedule, "flash-mla .*release of 2026-09-30 and later ones have no dense decode"),
        (_fork, _schedule, "sgl-flash-mla .*built without its legacy kernels"),
        (_dense, _schedule_of_lengths, "flash-mla .*get_mla_metadata takes lengths"),
    ],
)
def test_a_build_without_this_kernel_says_so(decode: Any, schedule: Any, said: str, installed: Any) -> None:
    functions = {"flash_mla_with_kvcache": decode, "get_mla_metadata": schedule}
    installed("flash_mla", **functions, has_legacy=lambda: False)
    (reason,) = FlashMLADecodeBackend.broken_dependencies()
    assert re.search(said + r".*pip install 'mla-conformance\[flashmla\]'", reason)


def test_says_how_to_install_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("mla_conformance.backends.dependencies._installed", lambda module: False)
    (reason,) = FlashMLADecodeBackend.missing_dependencies()
    assert "package sgl-flash-mla not installed (pip install 'mla-conformance[flashmla]')" in reason
