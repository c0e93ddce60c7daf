"""Indexers and preparations: DeepGEMM's and LMDeploy's adapters against stand-ins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends import eager_prepare, prepare
from mla_conformance.backends.deep_gemm import DeepGemmIndexerBackend, DeepGemmIndexerVllm
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.roles import Role

DIM, PAGE = 128, 64
_IN_VLLM = "vllm/third_party/deep_gemm"
PACKAGES: Any = {
    DeepGemmIndexerBackend: ("sgl-deep-gemm 0.2.5", "deep_gemm/__init__.py:", "deep_gemm"),
    DeepGemmIndexerVllm: ("vllm 0.33.0", f"{_IN_VLLM}/_C.py:_register_deep_gemm_kernels.", _IN_VLLM.replace("/", ".")),
}
PREPARATION = prepare.IndexPreparation(DIM, 64, True, True, False, "pow2", True, 1e-6)


def scores(q: Tensor, weights: Tensor, k: Tensor, width: int) -> Tensor:
    found = torch.einsum("h,hs->s", weights, (q.float() @ k.mT).relu())
    return torch.nn.functional.pad(found, (0, width - len(found)), value=torch.nan)


@pytest.fixture(params=PACKAGES)
def library(request: Any, provided: Any) -> Any:
    """Gathered: row t holds at column 0 its first key. Paged: pages of codes before scales, one length a row.

    Queries have a place for scales. In the package that vLLM carries four query tokens share pairs of processors.
    """
    kernel = request.param
    label, file, module = PACKAGES[kernel]
    in_vllm = kernel is DeepGemmIndexerVllm

    def queries(a: Any) -> Any:
        found, no_scales = a["q"]
        assert no_scales is None
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

    def schedule(context_lens: Tensor, block_kv: int, num_sms: int, **_: Any) -> Any:
        return list(context_lens.shape), block_kv, num_sms

    kernels = {f"{file}fp8_fp4_mqa_logits": gathered, f"{file}fp8_fp4_paged_mqa_logits": paged}
    if not in_vllm:  # where it is an operator without a function around it
        kernels[f"{file}get_paged_mqa_logits_metadata"] = lambda a: schedule(**a)
    provided(label, module, kernels, get_num_sms=lambda: 132, get_paged_mqa_logits_metadata=schedule)
    return kernel


@pytest.mark.parametrize("batch", ["q=[1,3]", "q=[1,1]", "q=[2,2]", "q=[4,4]", "q=[20,3];gathered=1;spare=4"])
def test_deep_gemm_is_called_as_it_documents(batch: str, library: Any, passes: Any) -> None:
    name = "DEEPGEMM_INDEXER" + ("[vllm]" if library is DeepGemmIndexerVllm else "")
    passes(name, Role.INDEXER, f"indexer_logits:call=index_logits;heads=32;{batch};kv=[69,127];inflate=2")


@pytest.fixture
def lmdeploy(provided: Any) -> None:
    modules: dict[str, dict[str, Any]] = {"bitonic_topk": {"bitonic_topk": _topk}, "ds_index": {"fp8_index": _scores}}
    modules["dsa_indexer_preprocess"] = {"prepare_dsa_indexer_q": _query, "prepare_dsa_indexer_k_cache": _keys}
    for name, calls in modules.items():
        provided("lmdeploy 0.18.0", f"lmdeploy.pytorch.kernels.cuda.{name}", calls)


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
            out[row] = scores(a["q"][row], a["q_s"][row], keys, a["max_k_seqlen"])
            out[row, length - start[request + 1] + row + 1 : length] = -torch.inf
    return out


def _prepared(tokens: int, a: Any, heads: int = 1) -> eager_prepare.EagerPrepareBackend:
    """Who turns and quantises what the kernels are given, by the table that they are given."""
    interleaved, eps = a["rope_interleaved"], a.get("eps", 1e-6)
    asked = PREPARATION._replace(is_neox_style=not interleaved, fold_scales=False, eps=eps)
    backend = eager_prepare.EagerPrepareBackend(heads, 1.0, asked, None)
    assert a["cos"].shape == a["sin"].shape == (tokens, 64)
    table = torch.cat((a["cos"][:, :32], a["sin"][:, :32]), dim=1)
    assert torch.equal(a["cos"][:, 32:], a["cos"][:, :32])
    backend.prepare_metadata(prepare.PrepareMetadata(torch.arange(tokens), table))
    return backend


def _query(a: Any) -> tuple[Tensor, Tensor]:
    q, weights = a["q"], a["weights"]
    assert q.dtype == torch.bfloat16 and q.stride(-1) == weights.stride(-1) == 1
    backend = _prepared(len(q), a, q.shape[1])
    codes, scale = backend._quantised(backend._turned(q.float()))
    return codes, scale[..., 0] * weights.float() * a["score_scale"]


def _keys(a: Any) -> None:
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
def test_lmdeploys_kernels_are_called_as_their_sources_say(passes: Any) -> None:
    passes("LMDEPLOY_TRITON", Role.TOPK, "select:q=[1,2];kv=[5,89];pad=1;topk=8;layout=sliced")
    for batch in ("q=[1,3]", "q=[1,1]"):
        scores = f"heads=32;{batch};kv=[69,127]"
        cases = f"indexer_logits:call=index_logits;{scores}", f"indexer_topk:call=index_topk;{scores};topk=16"
        passes("LMDEPLOY_TRITON", Role.INDEXER, *cases)
    prepared = "prepare_index:heads=32;q=[70];kv=[20];scales=pow2;hadamard=0;fused=1;layout=sliced;pairs"
    passes("LMDEPLOY_TRITON", Role.PREPARE, f"{prepared}=halves", f"{prepared}=neighbours")


def test_what_is_not_declared_is_refused(library: Any, passes: Any, prepared: Any) -> None:
    scores = "indexer_topk:call=index_topk;heads=32;q=[1,3];kv=[69,127];topk=8"
    kernel, call = prepared(passes("DEEPGEMM_INDEXER", Role.INDEXER), scores)
    with pytest.raises(UnsupportedConfiguration, match="DEEPGEMM_INDEXER: topk not supported"):
        call.invoke(kernel, None)
