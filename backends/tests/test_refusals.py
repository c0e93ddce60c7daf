"""What kernels of every role refuse before they launch: operands beside their metadata, and what is not declared."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, LseClass, Rounding, declaration_of
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeSelectorConfig
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.interface import MLAPrefillBackend, MLAPrefillSelectorConfig
from mla_conformance.backends.kernel import DeviceCapability, UnsupportedConfiguration
from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.backends.prepare import IndexPreparation, MLAPrepareSelectorConfig, PrepareMetadata
from mla_conformance.backends.quant_key import QuantKey, fp8_static_tensor_sym
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.backends.topk import TopKMetadata
from mla_conformance.backends.torch_rows import (
    TorchEfficientDecodeBackend,
    TorchSDPADecodeBackend,
    TorchSDPASparseBackend,
)
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks
from mla_conformance.reference.dimensions import PRESETS

CPU, BF16, ONE = torch.device("cpu"), torch.bfloat16, torch.tensor(1.0)


def int32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def batch(*query_lens: int, contexts: tuple[int, ...] = ()) -> Any:
    chunks = plan_context_chunks(contexts, workspace_tokens=64, page_size=16)
    context = chunked_context_metadata(chunks, torch.empty(64, 40), CPU) if chunks else None
    table = torch.zeros(len(query_lens), 1, dtype=torch.int32)
    return prefill_metadata(query_lens, block_table=table, dtype=BF16, device=CPU, chunked_context=context)


def prefill(kernel: Any, chunk: int | None = None, lse: bool = False, **changes: Any) -> None:
    widths = (("q", 24), ("k", 24), ("v", 12))
    given = {name: torch.zeros(5, 2, width, dtype=BF16) for name, width in widths} | changes
    backend = kernel(2, 0.2, 32, 16, 8, 12, None)
    backend.prepare_metadata(batch(5))
    if chunk is None:
        backend.run_prefill_new_tokens(**given, return_softmax_lse=lse)
    else:
        backend.run_prefill_context_chunk(chunk, **given)


TABLE = int32([5, 2, 7, 2**31 - 1], [-1, -1, -1, -1], [1, 4, -1, 99])
LENGTHS: dict[str, Any] = {"seq_lens": int32(9, 0, 5), "seq_lens_cpu": int32(9, 0, 5), "max_seq_len": 9}
LENGTHS |= {"query_start_loc": int32(0, 2, 3, 6), "query_lens_cpu": int32(2, 1, 3), "max_query_len": 3}


def decode(kernel: Any, table: Any = TABLE, **changes: Any) -> None:
    backend = kernel(2, 0.11, 512, 128, 64, 128, "auto", None)
    backend.prepare_metadata(MLACommonDecodeMetadata(block_table=table, **LENGTHS))
    q, cache = torch.zeros(6, 2, 576).bfloat16(), torch.zeros(9, 4, 576).bfloat16()
    backend.run_decode(**{"ql_nope": q[..., :512], "q_pe": q[..., 512:], "kv_cache": cache, "k_scale": ONE} | changes)


def lists(row: int = 0, column: int = 0, slot: int = 5) -> torch.Tensor:
    """Two slots a list of 16, and one of them another."""
    indices = torch.full((6, 16), -1, dtype=torch.int32)
    indices[:, 0], indices[:, 1] = 5, 9
    indices[row, column] = slot
    return indices


def sparse(kernel: Any, layout: str = "auto", second: str | None = None, keys: Any = None, **changes: Any) -> None:
    backend = kernel(2, 0.05, 512, 128, 64, 128, layout, None, second)
    places = {"req_id_per_token": int32(0, 0, 1, 2, 2, 2), "block_table": TABLE, "workspace_starts": None}
    backend.prepare_metadata(MLASparseMetadata(**LENGTHS, **places, index_space=IndexSpace.SLOT))  # type: ignore[arg-type]
    given = {"q": torch.zeros(6, 2, 576).bfloat16(), "topk_indices": lists(), "return_softmax_lse": True}
    if keys is None:
        given |= {"kv_cache": torch.zeros(9, 4, 576).bfloat16(), "k_scale": ONE}
        backend.run_sparse_decode(**given | changes)
    else:
        backend.run_sparse_prefill(kv=keys, **given)


WINDOWS = TopKMetadata(int32(3, 5), int32(1, 0), 5)


def top_k(kernel: Any, logits: Any = None, topk: int = 4, **changes: Any) -> None:
    backend = kernel(vllm_config=None)
    backend.prepare_metadata(replace(WINDOWS, **changes))
    backend.run_top_k_per_row(torch.zeros(2, 6) if logits is None else logits, topk)


MODEL = IndexPreparation(
    head_dim=64, rope_dim=16, rope_first=True, is_neox_style=True, hadamard=True, scale_format="pow2",
    fold_scales=True, eps=1e-6,
)  # fmt: skip


def prepare(kernel: Any, model: IndexPreparation = MODEL, **changes: Any) -> None:
    given = {"q": torch.ones(3, 2, 64).bfloat16(), "k": torch.ones(3, 64).bfloat16(), "weights": torch.ones(3, 2)}
    given |= {"k_norm_weight": torch.ones(64), "k_norm_bias": torch.ones(64)}
    given |= {"positions": torch.zeros(3, dtype=torch.int64), "cos_sin_cache": torch.ones(1, 16)} | changes
    backend = kernel(num_heads=2, scale=0.125, preparation=model, vllm_config=None)
    backend.prepare_metadata(PrepareMetadata(given.pop("positions"), given.pop("cos_sin_cache")))
    backend.run_prepare_index(**given)


PREFILLS = EagerPrefillBackend, TorchSDPAPrefillBackend
DECODES = EagerDecodeBackend, TorchSDPADecodeBackend
E4M3_OUT = r"expects a float8_e4m3fn out tensor, got (none|torch\.bfloat16)"
DOUBLE, WIDE = {name: torch.zeros(5, 2, 24).double() for name in "qk"}, torch.zeros(9, 4, 656, dtype=torch.uint8)
_LATENT = {"ql_nope": torch.zeros(6, 2, 512).double(), "q_pe": torch.zeros(6, 2, 64).double()}
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (
        prefill,
        PREFILLS,
        {"q": torch.zeros(4, 2, 24).bfloat16()},
        r"q: expected at least 5 tokens of \[2, 24\] by the me",
    ),
    (prefill, PREFILLS, {"v": torch.zeros(10, 12).bfloat16()}, r"v: expected .* got shape \[10, 12\]"),
    (prefill, PREFILLS, DOUBLE, r"dtype torch\.float64 not supported \(supported: torch\.float16"),
    (prefill, PREFILLS, {"chunk": 2}, r"context chunk 2 asked for.*no chunked context"),
    (prefill, PREFILLS[1:], {"output_scale": ONE}, "TORCH_SDPA: quantised output not supported"),
    (prefill, PREFILLS[:1], {"output_scale": ONE}, E4M3_OUT),
    (prefill, PREFILLS[:1], {"output_scale": ONE, "out": torch.zeros(5, 2, 12).bfloat16()}, E4M3_OUT),
    (decode, DECODES, _LATENT, "dtype torch.float64 not supported"),
    (decode, DECODES, {"ql_nope": torch.zeros(4, 2, 512).bfloat16()}, r"ql_nope: expected at least 6 tokens of \[2, 5"),
    (decode, DECODES, {"kv_cache": torch.zeros(9, 4, 500).bfloat16()}, r"kv_cache: expected \[blocks, page, 576\] of"),
    (decode, DECODES, {"kv_cache": torch.zeros(9, 4, 576)}, "for auto, got .* of torch.float32"),
    (decode, DECODES, {"table": TABLE[:, :2]}, "a sequence of 9 tokens has 3 pages of 4, its row holds 2"),
    (sparse, (), {"topk_indices": lists().long()}, "topk_indices: expected lists of torch.int32, got torch.int64"),
    (sparse, (), {"topk_indices": lists()[:5]}, r"expected a list for each of 6 query tokens, got shape \[5, 16\]"),
    (sparse, (), {"topk_indices": lists(1, 2, 36)}, "topk_indices: expected 0 to 35, or -1, got 36 in row 1, column 2"),
    (sparse, (), {"keys": torch.zeros(5, 1, 576).bfloat16()}, "expected 0 to 4, or -1, got 5 in row 0, column 0"),
    (sparse, (), {"topk_length": int32(3, 3, 0, 17, 3, 3)}, "topk_length: expected 0 to 16, .*, got 17 in row 3"),
    (sparse, (), {"topk_length": torch.ones(6)}, r"topk_length: expected \[6\] of torch.int32, .* got \[6\] of"),
    (sparse, (), {"attn_sink": torch.zeros(3)}, r"attn_sink: expected \[2\] of .*, a logit for each head, got \[3\]"),
    (sparse, (), {"kv_cache": WIDE}, r"expected .* for auto, got .* of torch.uint8, which is as wide as fp8_ds_mla"),
    (sparse, (), {"kv_cache": WIDE[..., 56:]}, r"got \[9, 4, 600\] of .*, which is as wide as no layout of such keys"),
    (sparse, (), {"q": torch.zeros(6, 2, 512).bfloat16()}, r"q: expected 6 tokens of \[2, 576\] by the metadata"),
    (sparse, (), {"extra_kv_cache": WIDE}, "extra_kv_cache: expected extra_topk_indices with it and its dtype"),
    (sparse, (), {"layout": "fp7"}, "unknown cache layout 'fp7'; expected one of auto, fp8, fp8_ds_mla, fp8_v4"),
    (sparse, (), {"second": "fp7"}, "unknown cache layout 'fp7'"),
    (sparse, (TorchSDPASparseBackend,), {"attn_sink": torch.zeros(2)}, "TORCH_SDPA: sinks not supported"),
    (top_k, (), {"logits": torch.zeros(6)}, r"logits: expected \[T, C\] with neighbouring columns, got \[6\]"),
    (top_k, (), {"logits": torch.zeros(2, 6)[:, ::2]}, "with neighbouring columns, got .* of strides .6, 2."),
    (top_k, (), {"lengths": torch.ones(2).long()}, r"lengths: expected \[2\] of torch.int32, .* of torch.int64"),
    (top_k, (), {"max_seq_len": 7}, "max_seq_len: expected at most the 6 columns, got 7"),
    (top_k, (), {"topk": 0}, "topk_tokens: expected a positive number, got 0"),
    (top_k, (), {"logits": torch.zeros(2, 6).double()}, r"dtype torch\.float64 not supported"),
    (prepare, (), {"k": torch.ones(3, 64)}, r"k: expected \[3, 64\] of torch.bfloat16, got \[3, 64\] of torch.float32"),
    (prepare, (), {"cos_sin_cache": torch.ones(1, 8)}, r"cos_sin_cache: expected \[1, 16\] of .*, got \[1, 8\]"),
    (prepare, (), {"model": MODEL._replace(scale_format="ue4m3")}, "scale_format: expected one of .*, got 'ue4m3'"),
]
EAGER = {sparse: EagerSparseBackend, top_k: EagerTopKBackend, prepare: EagerPrepareBackend}


@pytest.mark.parametrize(("call", "kernels", "changes", "said"), REFUSED)
def test_operands_that_do_not_fit_are_refused(call: Any, kernels: Any, changes: Any, said: str) -> None:
    for kernel in kernels or (EAGER[call],):
        with pytest.raises(ValueError, match=said):
            call(kernel, **changes)


@pytest.mark.parametrize("call", [prefill, decode, sparse, top_k, prepare])
def test_operands_that_fit_are_not(call: Any) -> None:
    for kernel in {prefill: PREFILLS, decode: DECODES}.get(call) or (EAGER[call],):
        call(kernel)
    if call is prefill:  # with rows behind those that the metadata counts
        call(EagerPrefillBackend, q=torch.zeros(7, 2, 24).bfloat16(), k=torch.zeros(6, 2, 24).bfloat16())


class Narrow(EagerDecodeBackend):
    """Declares one token, one page size, one layout, one pair of dims."""

    supported_query_len = 1
    supports_nonuniform_queries = False
    supports_causal_dcp = False
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [64]


CONFIG = MLADecodeSelectorConfig(BF16, "auto", 64, 512, 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"kv_cache_dtype": "bfloat16"}, ""),
        ({"block_size": 16}, "block_size 16 not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla", "tile_scales": "pow2"}, "kv_cache_dtype fp8_ds_mla not supported"),
        (
            {"kv_cache_dtype": "bfloat16", "dtype": torch.float16},
            "kv_cache_dtype bfloat16 expects a model of bfloat16, got torch.float16; use auto",
        ),
        ({"kv_lora_rank": 256}, "latent dims (L, R) = (256, 64) not supported (supported: [(512, 64)])"),
        ({"max_query_len": 2}, "2 query tokens a request not supported"),
        ({"uniform": False}, "requests with different numbers of query tokens not supported"),
        ({"dtype": torch.float64}, "dtype torch.float64 not supported"),
    ],
)
def test_a_configuration_is_refused_with_every_reason(change: dict[str, Any], reason: str) -> None:
    assert Narrow.validate_configuration(None, CONFIG._replace(**change)) == [reason] * bool(reason)


def test_what_is_declared_unsupported_is_refused_by_the_call_too() -> None:
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: block_size 4 not supported; 3 query tokens a request"):
        decode(Narrow)
    one = type("Heads", (EagerSparseBackend,), {"supported_heads": [64]})
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: 2 heads not supported \(supported: \[64\]\)$"):
        sparse(one)
    once = type("Once", (EagerSparseBackend,), {"supports_duplicates": False})
    with pytest.raises(UnsupportedConfiguration, match="lists that name a key twice not supported"):
        sparse(once, topk_indices=lists(0, 1, 5))
    r1 = {"supported_mla_dimensions": [PRESETS["r1"].head]}
    for kernel in PREFILLS:
        with pytest.raises(UnsupportedConfiguration, match=r"MLA dimensions .*qk_nope_head_dim=16.* not supported"):
            prefill(type("Dims", (kernel,), r1))
    narrow: Any = type("Narrow", (EagerPrepareBackend,), {"supports_hadamard": [False], "supported_head_dims": [128]})
    reasons = narrow.validate_configuration(None, MLAPrepareSelectorConfig(BF16, 2, MODEL))
    assert reasons == ["head dim 64 not supported (supported: [128])", "hadamard=True not supported"]


def test_reasons_come_in_the_order_of_vllm() -> None:
    config = MLAPrefillSelectorConfig(torch.float16, PRESETS["glm"].head)
    picky: dict[str, Any] = {"supported_dtypes": [BF16], "supported_mla_dimensions": [PRESETS["r1"].head]}
    picky["supports_compute_capability"] = classmethod(lambda cls, device_capability: False)
    picky["missing_dependencies"] = classmethod(lambda cls: ["pip install picky"])
    made: Any = type("Picky", (EagerPrefillBackend,), picky)
    *others, dimensions = made.validate_configuration(DeviceCapability(8, 0), config)
    assert others == [
        "compute capability 8.0 not supported",
        "dtype torch.float16 not supported",
        "required dependencies not available: pip install picky",
    ]
    said = f"MLA dimensions {PRESETS['glm'].head} not supported (supported: {PRESETS['r1'].head})"
    assert dimensions.startswith(said)
    with pytest.raises(TypeError, match="abstract"):
        MLAPrefillBackend(4, 1.0, 512, 128, 64, 128, None)  # type: ignore[abstract]


def test_what_is_declared_beside_reasons() -> None:
    """Fused output by its key, a rounding by its class, another kernel for a GPU."""
    dims, key = (4, 1.0, 512, 128, 64, 128, None), fp8_static_tensor_sym()
    eager, sdpa = (kernel(*dims) for kernel in PREFILLS)
    assert eager.supports_quant_output(key) and not sdpa.supports_quant_output(key)
    assert not eager.supports_quant_output(QuantKey(torch.int8, key.scale))
    assert declaration_of(object) == Declaration(rounding=Rounding(lse=LseClass.EXACT))
    with pytest.raises(TypeError, match=r"Wrong\.declaration must be a Declaration, got dict"):
        declaration_of(type("Wrong", (), {"declaration": {"emulated": True}}))
    assert TorchSDPADecodeBackend.resolve(None) is TorchSDPADecodeBackend
    assert TorchSDPADecodeBackend.resolve(DeviceCapability(9, 0)) is TorchEfficientDecodeBackend
    assert replace(TorchEfficientDecodeBackend.declaration, deviations=()) != TorchSDPADecodeBackend.declaration


def test_plans_that_contradict_their_batch_are_refused() -> None:
    for lengths in ((), (3, -1)):
        with pytest.raises(ValueError, match="expected one non-negative query length per request, got"):
            batch(*lengths)
    with pytest.raises(ValueError, match="context plan has 3 requests, the batch 2"):
        batch(5, 9, contexts=(40, 0, 70))
    with pytest.raises(ValueError, match="at least one context chunk, got none; pass chunked_context=None"):
        chunked_context_metadata([], torch.empty(64, 40), CPU)
    with pytest.raises(ValueError, match="chunk of 65 tokens does not fit a workspace of 64 tokens"):
        chunked_context_metadata([ContextChunk((0, 0), (1, 64))], torch.empty(64, 40), CPU)
