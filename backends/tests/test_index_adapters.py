"""Indexers and preparations: EAGER's refusals, and DeepGEMM's and LMDeploy's adapters against stand-ins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.deep_gemm import DeepGemmIndexerBackend, DeepGemmIndexerVllm
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.lmdeploy_index import LmdeployIndexerBackend, LmdeployPrepareBackend, LmdeployTopKBackend
from mla_conformance.backends.prepare import IndexPreparation, PrepareMetadata
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.backends.topk import TopKMetadata
from mla_conformance.reference.cache_layout import encode
from mla_conformance.reference.kv_cache import write_entries

HEADS, DIM, PAGE = 32, 128, 64
PACKAGES: Any = {
    DeepGemmIndexerBackend: ("sgl-deep-gemm 0.2.5", "deep_gemm/__init__.py:", "deep_gemm"),
    DeepGemmIndexerVllm: (
        "vllm 0.33.0",
        "vllm/third_party/deep_gemm/_C.py:_register_deep_gemm_kernels.",
        "vllm.third_party.deep_gemm",
    ),
}
QUERIES, LENGTHS = (1, 3), (70, 130)
PREPARATION = IndexPreparation(DIM, 64, True, True, False, "pow2", True, 1e-6)


def metadata(queries: tuple[int, ...], paged: bool) -> MLASparseMetadata:
    """Requests of :data:`LENGTHS` tokens: pages from the last to the first, or gathered behind four rows each."""
    starts = [sum(queries[:request]) for request in range(len(queries) + 1)]
    return MLASparseMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        req_id_per_token=torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(queries)),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=torch.tensor([[4, 3, -1], [2, 1, 0]], dtype=torch.int32) if paged else None,
        workspace_starts=None if paged else torch.tensor([4, 78], dtype=torch.int32),
        index_space=IndexSpace.POSITION,
        max_query_len=max(queries),
        max_seq_len=150,
        query_lens_cpu=torch.tensor(queries, dtype=torch.int32),
        seq_lens_cpu=torch.tensor(LENGTHS, dtype=torch.int32),
    )


def operands(queries: tuple[int, ...], paged: bool) -> dict[str, Tensor]:
    """What a call takes, every key but those of the requests NaN."""
    generator = torch.Generator().manual_seed(0)
    made = metadata(queries, paged)
    entries = encode(torch.randn(200, DIM, generator=generator).bfloat16(), torch.empty(200, 0), "fp8_index", 1.0)
    positions = [torch.arange(length) for length in LENGTHS]
    rows = torch.cat([4 + positions[0], 78 + positions[1]])
    if made.block_table is not None:
        tables = zip(made.block_table.long(), positions, strict=True)
        rows = torch.cat([table[token // PAGE] * PAGE + token % PAGE for table, token in tables])
    stored = torch.full((5, PAGE, DIM + 4) if paged else (212, 1, DIM + 4), 255, dtype=torch.uint8)
    write_entries(stored, entries, rows, "fp8_index")
    q = torch.randn(sum(queries), HEADS, DIM, generator=generator).to(torch.float8_e4m3fn)
    common = {"q": q, "weights": torch.randn(sum(queries), HEADS, generator=generator)}
    if paged:
        return {**common, "k": stored}
    codes, scales = stored[:, 0, :DIM].contiguous(), stored[:, 0, DIM:].contiguous()
    return {**common, "k": codes.view(torch.float8_e4m3fn), "k_scale": scales.view(torch.float32)[:, 0]}


def prepared(kernel: type[MLAIndexerBackend], queries: tuple[int, ...], paged: bool) -> Any:
    backend = kernel(num_heads=HEADS, head_dim=DIM, kv_cache_dtype="fp8_index", vllm_config=None)
    backend.prepare_metadata(metadata(queries, paged))
    return backend


def scores(q: Tensor, weights: Tensor, k: Tensor, width: int) -> Tensor:
    found = torch.einsum("h,hs->s", weights, (q.float() @ k.mT).relu())
    return torch.nn.functional.pad(found, (0, width - len(found)), value=torch.nan)


@pytest.fixture(params=PACKAGES)
def library(request: Any, recorded: Any, installed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gathered: row t holds at column 0 its first key. Paged: pages of codes before scales, one length a row.

    In the package that vLLM carries queries have a place for scales, and four query tokens share pairs of processors.
    """
    kernel = request.param
    label, file, module = PACKAGES[kernel]
    in_vllm = kernel is DeepGemmIndexerVllm
    monkeypatch.setattr(kernel, "supports_compute_capability", lambda *_: True)

    def queries(a: Any) -> Tensor:
        assert not in_vllm or a["q"][1] is None
        found: Tensor = a["q"][0] if in_vllm else a["q"]
        return found

    def gathered(a: Any) -> Tensor:
        codes, scales = a["kv"]
        assert all(a[name].dtype == torch.int32 for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
        ends = zip(a["cu_seq_len_k_start"].tolist(), a["cu_seq_len_k_end"].tolist(), strict=True)
        keys = [codes[first:end].float() * scales[first:end, None] for first, end in ends]
        rows = zip(queries(a), a["weights"], keys, strict=True)
        return torch.stack([scores(*row, a["max_seqlen_k"]) for row in rows])

    def paged(a: Any) -> Tensor:
        cache, lengths, q = a["kv_cache"], a["context_lens"], queries(a)
        shares = 66 if lengths.shape[1] == 4 else 132
        assert cache.shape[1:] == (PAGE, 1, DIM + 4) and a["schedule_meta"] == (list(lengths.shape), PAGE, shares)
        assert lengths.dtype == a["block_table"].dtype == torch.int32
        assert q.shape[:2] == lengths.shape and len(a["block_table"]) == len(lengths)
        assert lengths.shape[1] in ((1, 2, 4) if in_vllm else (1, 2))
        found, weights = [], a["weights"].unflatten(0, lengths.shape)
        for request, table in enumerate(a["block_table"].tolist()):
            for row, length in enumerate(lengths[request].tolist()):
                pages = [cache[block].flatten() for block in table[: -(-length // PAGE)]]
                codes = torch.cat([x[: PAGE * DIM].view(torch.float8_e4m3fn).view(PAGE, DIM) for x in pages])
                keys = codes.float() * torch.cat([x[PAGE * DIM :].view(torch.float32) for x in pages])[:, None]
                found.append(scores(q[request, row], weights[request, row], keys[:length], a["max_context_len"]))
        return torch.stack(found)

    def schedule(context_lens: Tensor, block_kv: int, num_sms: int) -> Any:
        return list(context_lens.shape), block_kv, num_sms

    def recorded_schedule(a: Any) -> Any:
        return schedule(a["context_lens"], a["block_kv"], a["num_sms"])

    metadata = f"{file}get_paged_mqa_logits_metadata"
    installed(
        module,
        get_num_sms=lambda: 132,
        fp8_fp4_mqa_logits=recorded(label, f"{file}fp8_fp4_mqa_logits", gathered),
        fp8_fp4_paged_mqa_logits=recorded(label, f"{file}fp8_fp4_paged_mqa_logits", paged),
        # In vLLM it is an operator without a function around it.
        get_paged_mqa_logits_metadata=schedule if in_vllm else recorded(label, metadata, recorded_schedule),
    )
    return kernel


@pytest.mark.parametrize(
    ("queries", "paged"), [((1, 3), True), ((1, 1), True), ((2, 2), True), ((4, 4), True), ((20, 3), False)]
)
def test_deep_gemm_is_called_as_it_documents(queries: tuple[int, ...], paged: bool, library: Any) -> None:
    given = operands(queries, paged)
    found, expected = (
        prepared(kernel, queries, paged).run_index_logits(**given) for kernel in (library, EagerIndexerBackend)
    )
    seen = expected != -torch.inf
    assert found.shape == expected.shape == (sum(queries), 150) and bool(seen[0].any())
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-3)


@pytest.fixture
def lmdeploy(recorded: Any, installed: Any, monkeypatch: Any) -> None:
    """A kernel a module, as on a GPU."""
    for adapter in (LmdeployTopKBackend, LmdeployIndexerBackend, LmdeployPrepareBackend):
        monkeypatch.setattr(adapter, "supports_compute_capability", lambda *_: True)
    modules: dict[str, dict[str, Any]] = {"bitonic_topk": {"bitonic_topk": _topk}, "ds_index": {"fp8_index": _scores}}
    modules["dsa_indexer_preprocess"] = {"prepare_dsa_indexer_q": _query, "prepare_dsa_indexer_k_cache": _keys}
    for name, calls in modules.items():
        module = f"lmdeploy/pytorch/kernels/cuda/{name}"
        functions = {each: recorded("lmdeploy 0.18.0", f"{module}.py:{each}", call) for each, call in calls.items()}
        installed(module.replace("/", "."), **functions)


def _topk(a: Any) -> Tensor:
    """The largest first, of those above a threshold."""
    scores, lengths, k = a["scores"], a["kv_seqlens"], a["k"]
    assert scores.is_contiguous() and len(lengths) == len(scores)
    seen = scores.masked_fill(torch.arange(scores.shape[1]) >= lengths[:, None], -torch.inf)
    best = torch.nn.functional.pad(seen, (0, k), value=-torch.inf).topk(k)
    return best.indices.masked_fill(best.values <= -1e6, -1).int()


def _scores(a: Any) -> Tensor:
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


def _query(a: Any) -> tuple[Tensor, Tensor]:
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


@pytest.mark.usefixtures("lmdeploy")
def test_lmdeploys_top_k_is_called_as_its_source_says() -> None:
    backend = LmdeployTopKBackend(None)
    backend.prepare_metadata(TopKMetadata(torch.tensor([0, 5, 90], dtype=torch.int32), None, 90))
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    found = backend.run_top_k_per_row(wide[:, :100], 8)
    assert found[0].tolist() == [-1] * 8 and found[1, 5:].tolist() == [-1] * 3
    assert found[1, :5].tolist() == wide[1, :5].argsort(descending=True).tolist()
    assert found[2].tolist() == wide[2, :90].argsort(descending=True)[:8].tolist()


@pytest.mark.usefixtures("lmdeploy")
@pytest.mark.parametrize("queries", [(1, 3), (1, 1), (2, 0)])
def test_lmdeploys_indexer_is_called_as_its_source_says(queries: tuple[int, ...]) -> None:
    given = operands(queries, True)
    kernels = [prepared(kernel, queries, True) for kernel in (LmdeployIndexerBackend, EagerIndexerBackend)]
    found, expected = (kernel.run_index_logits(**given) for kernel in kernels)
    seen = expected != -torch.inf
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-3)
    best, wanted = (kernel.run_index_topk(**given, topk_tokens=16).sort().values for kernel in kernels)
    assert torch.equal(best, wanted)


@pytest.mark.usefixtures("lmdeploy")
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_lmdeploys_preparation_is_called_as_its_source_says(is_neox_style: bool) -> None:
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


def test_what_does_not_fit_or_is_not_declared_is_refused(library: Any) -> None:
    given, gathered = operands(QUERIES, True), operands(QUERIES, False)
    del gathered["k_scale"]
    for change, said in (
        ({"q": torch.zeros(4, HEADS, DIM)}, r"q: expected \[4, 32, 128\] of torch.float8_e4m3fn, got .* torch.float32"),
        ({"weights": torch.zeros(4, 1)}, r"weights: expected \[4, 32\] of torch.float32, got \[4, 1\]"),
        ({"k": torch.zeros(5, PAGE, DIM).byte()}, r"k: expected \[5, 64, 132\] .*, got \[5, 64, 128\]"),
        ({"k_scale": torch.zeros(4)}, r"k_scale: expected None, since no gathered codes were given, got \[4\]"),
    ):
        with pytest.raises(ValueError, match=said):
            prepared(EagerIndexerBackend, QUERIES, True).run_index_logits(**{**given, **change})
    with pytest.raises(ValueError, match="k_scale: expected the scales of gathered codes, got None"):
        prepared(EagerIndexerBackend, QUERIES, False).run_index_logits(**gathered)
    with pytest.raises(ValueError, match="topk_tokens: expected a positive number, got 0"):
        prepared(EagerIndexerBackend, QUERIES, True).run_index_topk(**given, topk_tokens=0)
    with pytest.raises(UnsupportedConfiguration, match="DEEPGEMM_INDEXER: topk not supported"):
        prepared(library, QUERIES, True).run_index_topk(**given, topk_tokens=8)
