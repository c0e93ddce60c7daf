"""The adapter of PyTorch's efficient attention against a stand-in behind the operator's own schema."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.torch_efficient import TorchEfficientPrefillBackend

_ARGUMENTS = [a.name for a in torch.ops.aten._efficient_attention_forward.default._schema.arguments]


@pytest.fixture
def operator(monkeypatch: Any, kernel: Any) -> None:
    """Bottom-right for mask 2; LSE [B, N, a multiple of 32]; garbage in rows without keys."""

    def call(*args: Any, **kwargs: Any) -> Any:
        a = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        assert set(a) <= set(_ARGUMENTS) and a["bias"] is None and a["dropout_p"] == 0.0 and a["compute_log_sumexp"]
        q, k, v = (a[name][0] for name in ("query", "key", "value"))
        assert all(x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0 for x in (q, k, v))
        queries, keys = a["cu_seqlens_q"], a["cu_seqlens_k"]
        assert (a["max_seqlen_q"], a["max_seqlen_k"]) == (int(queries.diff().max()), int(keys.diff().max()))
        output, lse = kernel(q, k, v, queries, keys, a["scale"], a["custom_mask_type"] == 2)
        output[lse[0] == -math.inf] = math.nan
        padded = torch.full((len(queries) - 1, lse.shape[0], -(-a["max_seqlen_q"] // 32) * 32), math.nan)
        for request, (first, last) in enumerate(zip(queries[:-1].tolist(), queries[1:].tolist(), strict=True)):
            padded[request, :, : last - first] = lse[:, first:last].nan_to_num(neginf=math.nan)
        return output[None], padded, None, None, a["max_seqlen_q"], a["max_seqlen_k"]

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", call)


@pytest.mark.usefixtures("operator")
def test_conventions(conforms: Any) -> None:
    conforms(TorchEfficientPrefillBackend)
