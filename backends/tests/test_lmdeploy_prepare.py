"""The adapter of LMDeploy's kernels that prepare index queries and keys against stand-ins that follow their source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.lmdeploy_index import LmdeployPrepareBackend
from mla_conformance.backends.prepare import IndexPreparation, PrepareMetadata

HEADS, DIM, PAGE = 32, 128, 64
PREPARATION = IndexPreparation(DIM, 64, True, True, False, "pow2", True, 1e-6)


@pytest.fixture
def library(recorded: Any, installed: Any, monkeypatch: Any) -> None:
    """As on a GPU."""
    monkeypatch.setattr(LmdeployPrepareBackend, "supports_compute_capability", lambda *_: True)
    module = "lmdeploy.pytorch.kernels.cuda.dsa_indexer_preprocess"
    kernels = {"prepare_dsa_indexer_q": _query, "prepare_dsa_indexer_k_cache": _keys}
    file = f"{module.replace('.', '/')}.py"
    installed(module, **{name: recorded("lmdeploy 0.18.0", f"{file}:{name}", call) for name, call in kernels.items()})


def _prepared(tokens: int, a: Any, heads: int = 1) -> EagerPrepareBackend:
    """Who turns and quantises what the kernels are given, by the table that they are given."""
    interleaved, eps = a["rope_interleaved"], a.get("eps", 1e-6)
    asked = PREPARATION._replace(is_neox_style=not interleaved, fold_scales=False, eps=eps)
    backend = EagerPrepareBackend(heads, 1.0, asked, None)
    assert a["cos"].shape == a["sin"].shape == (tokens, 64)
    table = torch.cat((a["cos"][:, :32], a["sin"][:, :32]), dim=1)
    assert torch.equal(a["cos"][:, 32:], a["cos"][:, :32])
    backend.prepare_metadata(PrepareMetadata(torch.arange(tokens), table))
    return backend


def _query(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, weights = a["q"], a["weights"]
    assert q.dtype == torch.bfloat16 and q.stride(-1) == weights.stride(-1) == 1
    backend = _prepared(len(q), a, q.shape[1])
    codes, scale = backend._quantised(backend._turned(q.float()))
    return codes, scale[..., 0] * weights.float() * a["score_scale"]


def _keys(a: Any) -> None:
    """The tokens of requests to their pages, block · page + offset."""
    k, cache = a["k"], a["k_cache"]
    assert cache.shape[1:] == (PAGE, DIM) and a["k_s_cache"].shape == cache.shape[:2]
    assert a["cu_seqlen_q"].tolist() == [0, len(k)] and a["kv_seqlens"].tolist() == [len(k)]
    assert a["max_q_seqlen"] == len(k) and len(a["block_offsets"]) == 1
    backend = _prepared(len(k), a)
    normed = backend._normed(k.float(), a["norm_weight"], a["norm_bias"])
    codes, scale = backend._quantised(backend._turned(normed.unsqueeze(1)))
    token = torch.arange(len(k))
    slots = a["block_offsets"][0, token // PAGE].long() * PAGE + token % PAGE
    cache.view(torch.uint8).view(-1, DIM)[slots] = codes[:, 0].view(torch.uint8)
    a["k_s_cache"].view(-1)[slots] = scale[:, 0, 0]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_preparation_conventions(is_neox_style: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, wide = (torch.randn(70, width, generator=generator).bfloat16() for width in (HEADS * DIM, DIM + 9, 2 * HEADS))
    norm = torch.rand(2, DIM, generator=generator)
    angles = torch.rand(99, 32, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    asked = PREPARATION._replace(is_neox_style=is_neox_style)
    positions = torch.arange(70).flip(0) + 20
    results = []
    for adapter in (LmdeployPrepareBackend, EagerPrepareBackend):
        backend = adapter(HEADS, 0.3, asked, None)
        backend.prepare_metadata(PrepareMetadata(positions, table))
        results.append(backend.run_prepare_index(q.unflatten(1, (HEADS, DIM)), k[:, :DIM], wide[:, ::2], *norm))
    for found, expected in zip(*results, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=0)
