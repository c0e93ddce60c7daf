"""The adapter against a stand-in that follows vLLM's operator; the kernel itself needs Blackwell."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from mla_conformance.backends.cutlass_mla import CutlassMLADecodeBackend

_LABEL, _FILE = "vllm 0.33.0", "vllm/_custom_ops.py"


@pytest.fixture
def library(recorded: Any, installed: Any, mla_kernel: Any) -> None:
    """128 heads, one query token a request; natural LSE [B, 128], +inf and garbage in a row without keys."""

    def decode(a: Any) -> Any:
        q_nope, q_pe, cache, table = a["q_nope"], a["q_pe"], a["kv_c_and_k_pe_cache"], a["page_table"]
        tokens = q_nope.shape[0]
        assert (q_nope.shape, q_pe.shape) == ((tokens, 128, 512), (tokens, 128, 64))
        assert a["out"].shape == (tokens, 128, 512) and a["lse"].shape == (tokens, 128)
        assert all(x.is_contiguous() for x in (q_nope, q_pe, table, a["out"], a["lse"]))
        assert a["workspace"].dtype == torch.uint8 and a["workspace"].numel() == 4096 and a["num_kv_splits"] == -1
        lengths = a["seq_lens"].tolist()
        # The heads of padding are the same in each row: two stand for all of them.
        query = torch.cat([q_nope, q_pe], dim=-1)
        assert not query[:, 2:].any()
        output, lse = mla_kernel(query[:, :2], cache, lengths, [1] * tokens, table, a["scale"])
        empty = lse[0] == -math.inf
        output[empty], lse[:, empty] = math.nan, math.inf
        a["out"].copy_(pad(output, (0, 0, 0, 126)))
        a["lse"].copy_(pad(lse, (0, 0, 0, 126)).mT)
        return a["out"]

    def size(a: Any) -> int:
        assert a["max_seq_len"] % 128 == 0 and a["sm_count"] == 0 and a["num_kv_splits"] == -1
        return 4096

    installed(
        "vllm._custom_ops",
        sm100_cutlass_mla_decode=recorded(_LABEL, f"{_FILE}:sm100_cutlass_mla_decode", decode),
        sm100_cutlass_mla_get_workspace_size=recorded(_LABEL, f"{_FILE}:sm100_cutlass_mla_get_workspace_size", size),
    )


@pytest.mark.usefixtures("library")
def test_conventions(decodes: Any) -> None:
    decodes(CutlassMLADecodeBackend, 128, (1, 1, 1), (129, 0, 260))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_build_without_the_operator_says_so(compiled: bool, installed: Any, monkeypatch: Any) -> None:
    installed("vllm._custom_ops")
    operators = SimpleNamespace(sm100_cutlass_mla_decode=None) if compiled else SimpleNamespace()
    monkeypatch.setattr(torch.ops, "_C", operators, raising=False)
    reasons = CutlassMLADecodeBackend.broken_dependencies()
    assert bool(reasons) != compiled and (compiled or "lack sm100_cutlass_mla_decode" in reasons[0])
