"""The adapters of LMDeploy's kernels around the selection against stand-ins that follow their source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.lmdeploy_index import (
    LmdeployIndexerBackend,
    LmdeployPrepareBackend,
    LmdeployTopKBackend,
)
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.prepare import IndexPreparation, PrepareMetadata
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.backends.topk import TopKMetadata
from mla_conformance.reference.cache_layout import encode
from mla_conformance.reference.kv_cache import write_entries

_LABEL, _FOLDER = "lmdeploy 0.18.0", "lmdeploy/pytorch/kernels/cuda"
HEADS, DIM, PAGE, HOPPER = 32, 128, 64, DeviceCapability(9, 0)
PREPARATION = IndexPreparation(DIM, 64, True, True, False, "pow2", True, 1e-6)
LENGTHS = (70, 130)


@pytest.fixture
def library(recorded: Any, installed: Any, monkeypatch: Any) -> None:
    """A kernel a module, as on a GPU."""
    for adapter in (LmdeployTopKBackend, LmdeployIndexerBackend, LmdeployPrepareBackend):
        monkeypatch.setattr(adapter, "supports_compute_capability", lambda *_: True)

    def stand_in(module: str, **kernels: Any) -> None:
        found = {name: recorded(_LABEL, f"{_FOLDER}/{module}.py:{name}", kernel) for name, kernel in kernels.items()}
        installed(f"lmdeploy.pytorch.kernels.cuda.{module}", **found)

    stand_in("bitonic_topk", bitonic_topk=_topk)
    stand_in("ds_index", fp8_index=_scores)
    stand_in("dsa_indexer_preprocess", prepare_dsa_indexer_q=_query, prepare_dsa_indexer_k_cache=_keys)


def _topk(a: Any) -> torch.Tensor:
    """The largest first, of those above a threshold."""
    scores, lengths, k = a["scores"], a["kv_seqlens"], a["k"]
    assert scores.is_contiguous() and len(lengths) == len(scores)
    seen = scores.masked_fill(torch.arange(scores.shape[1]) >= lengths[:, None], -torch.inf)
    best = torch.nn.functional.pad(seen, (0, k), value=-torch.inf).topk(k)
    return best.indices.masked_fill(best.values <= -1e6, -1).int()


def _scores(a: Any) -> torch.Tensor:
    """Of each row those up to its own token, -inf behind; nothing further than the request's last."""
    codes, scales, start = a["k_cache"], a["k_s_cache"], a["cu_seqlen_q"].tolist()
    assert codes.shape[1:] == (PAGE, DIM) and codes.stride(1) == DIM and scales.shape == codes.shape[:2]
    assert a["causal"] and a["q"].stride(-1) == 1 and len(a["k_seqlens"]) == len(start) - 1
    assert a["max_q_seqlen"] == 1 or len(a["q"]) != len(a["k_seqlens"])
    out = torch.full((len(a["q"]), a["max_k_seqlen"]), torch.nan)
    for request, length in enumerate(a["k_seqlens"].tolist()):
        table = a["block_offset"][request, : -(-length // PAGE)].long()
        keys = (codes[table].float() * scales[table].unsqueeze(-1)).flatten(0, 1)[:length]
        for row in range(start[request], start[request + 1]):
            found = torch.einsum("h,hs->s", a["q_s"][row], (a["q"][row].float() @ keys.mT).relu())
            found[length - start[request + 1] + row + 1 :] = -torch.inf
            out[row, :length] = found
    return out


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
def test_top_k_conventions() -> None:
    backend = LmdeployTopKBackend(None)
    backend.prepare_metadata(TopKMetadata(torch.tensor([0, 5, 90], dtype=torch.int32), None, 90))
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    found = backend.run_top_k_per_row(wide[:, :100], 8)
    assert found[0].tolist() == [-1] * 8 and found[1, 5:].tolist() == [-1] * 3
    assert found[1, :5].tolist() == wide[1, :5].argsort(descending=True).tolist()
    assert found[2].tolist() == wide[2, :90].argsort(descending=True)[:8].tolist()


def _metadata(queries: tuple[int, ...]) -> MLASparseMetadata:
    starts = [sum(queries[:request]) for request in range(len(queries) + 1)]
    lengths, asked = (torch.tensor(x, dtype=torch.int32) for x in (LENGTHS, queries))
    return MLASparseMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        req_id_per_token=torch.arange(2, dtype=torch.int32).repeat_interleave(asked),
        seq_lens=lengths,
        block_table=torch.tensor([[4, 3, -1], [2, 1, 0]], dtype=torch.int32),
        workspace_starts=None,
        index_space=IndexSpace.POSITION,
        max_query_len=max(queries),
        max_seq_len=150,
        query_lens_cpu=asked,
        seq_lens_cpu=lengths,
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("queries", [(1, 3), (1, 1), (2, 0)])
def test_indexer_conventions(queries: tuple[int, ...]) -> None:
    generator, cache = torch.Generator().manual_seed(0), torch.full((5, PAGE, DIM + 4), 255, dtype=torch.uint8)
    entries = encode(torch.randn(200, DIM, generator=generator).bfloat16(), torch.empty(200, 0), "fp8_index", 1.0)
    made = _metadata(queries)
    assert made.block_table is not None
    tables = zip(made.block_table.long(), map(torch.arange, LENGTHS), strict=True)
    slots = torch.cat([table[token // PAGE] * PAGE + token % PAGE for table, token in tables])
    write_entries(cache, entries, slots, "fp8_index")
    q = torch.randn(sum(queries), HEADS, DIM, generator=generator).to(torch.float8_e4m3fn)
    given = {"q": q, "weights": torch.rand(sum(queries), HEADS, generator=generator), "k": cache}
    kernels = [kernel(HEADS, DIM, "fp8_index", None) for kernel in (LmdeployIndexerBackend, EagerIndexerBackend)]
    for kernel in kernels:
        kernel.prepare_metadata(made)
    found, expected = (kernel.run_index_logits(**given) for kernel in kernels)
    seen = expected != -torch.inf
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-3)
    best, wanted = (kernel.run_index_topk(**given, topk_tokens=16).sort().values for kernel in kernels)
    assert torch.equal(best, wanted)


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
