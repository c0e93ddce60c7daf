"""What kernels of every role refuse before they launch: operands beside their metadata, and what is not declared."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mla_conformance.backends import eager_decode, eager_topk, interface, prepare, torch_sdpa
from mla_conformance.backends.declaration import Declaration, LseClass, Rounding, declaration_of
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.kernel import DeviceCapability, UnsupportedConfiguration
from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.problems.memory import Guarded
from mla_conformance.reference import chunking
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.roles.definition import DEFINITIONS, build_problem

CPU, BF16, ONE = torch.device("cpu"), torch.bfloat16, torch.tensor(1.0)


def int32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def batch(*query_lens: int, contexts: tuple[int, ...] = ()) -> Any:
    chunks = chunking.plan_context_chunks(contexts, workspace_tokens=64, page_size=16)
    context = chunked_context_metadata(chunks, torch.empty(64, 40), CPU) if chunks else None
    table = torch.zeros(len(query_lens), 1, dtype=torch.int32)
    return prefill_metadata(query_lens, block_table=table, dtype=BF16, device=CPU, chunked_context=context)


PREFILL = "new_tokens:dims=16-8-12-32;heads=2;q=[5];lse=0"
DECODE = "decode:heads=2;page=4;q=[2,1,3];kv=[7,0,2]"
SPARSE = "sparse_decode:heads=2;page=4;spare=2;q=[2,1,3];kv=[7,0,2];topk=16"
SCORES = "indexer_logits:call=index_logits;heads=32;q=[1,3];kv=[69,127]"
TOPK, PREPARE = "select:q=[1,1];kv=[3,6];topk=4", "prepare_index:heads=2;dims=48-16-64-64;q=[3];kv=[0];scales=pow2"
MODEL = prepare.IndexPreparation(64, 16, True, True, True, "pow2", True, 1e-6)

_USUAL: Any = object()


def called(kernel: Any, text: str, metadata: Any = lambda metadata: {}, out: Any = _USUAL, **changes: Any) -> None:
    case = Case.parse(text)
    (call,), backend = build_problem(case, CPU).calls, DEFINITIONS[case.role].kernel(kernel, case, BF16, CPU)
    own = {each.name: changes[each.name] for each in fields(call) if each.name in changes}
    call = replace(call, metadata=replace(call.metadata, **metadata(call.metadata)), **own).given_otherwise(**changes)
    call.prepare(backend)
    call.invoke(backend, call.output_buffer() if out is _USUAL else out)


def lists(row: int = 0, column: int = 0, slot: int = 5) -> torch.Tensor:
    indices = torch.full((6, 16), -1, dtype=torch.int32)
    indices[:, 0], indices[:, 1] = 5, 9
    indices[row, column] = slot
    return indices


PREFILLS = EagerPrefillBackend, torch_sdpa.TorchSDPAPrefillBackend
DECODES = eager_decode.EagerDecodeBackend, torch_sdpa.TorchSDPADecodeBackend
E4M3_OUT = r"expects a float8_e4m3fn out tensor, got (none|torch\.bfloat16)"
DOUBLE, WIDE = {name: torch.zeros(5, 2, 24).double() for name in "qk"}, torch.zeros(9, 4, 656, dtype=torch.uint8)
_LATENT = {"ql_nope": torch.zeros(6, 2, 512).double(), "q_pe": torch.zeros(6, 2, 64).double()}
FOUR = {"q": torch.zeros(4, 2, 24).bfloat16()}
_SECOND = f"{SPARSE};extra=auto"
_GATHERED = {"kv": torch.zeros(5, 1, 576).bfloat16(), "topk_indices": lists()}
_SHORT_TABLE: Any = lambda metadata: {"block_table": metadata.block_table[:, :2]}  # noqa: E731
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    (PREFILL, PREFILLS, FOUR, r"q: expected at least 5 tokens of \[2, 24\] by the me"),
    (PREFILL, PREFILLS, {"v": torch.zeros(10, 12).bfloat16()}, r"v: expected .* got shape \[10, 12\]"),
    (PREFILL, PREFILLS, DOUBLE, r"dtype torch\.float64 not supported \(supported: torch\.float16"),
    (PREFILL, PREFILLS, {"chunk_idx": 2}, r"context chunk 2 asked for.*no chunked context"),
    (PREFILL, PREFILLS[1:], {"output_scale": ONE}, "TORCH_SDPA: quantised output not supported"),
    (PREFILL, PREFILLS[:1], {"output_scale": ONE, "out": None}, E4M3_OUT),
    (PREFILL, PREFILLS[:1], {"output_scale": ONE, "out": Guarded.allocate((5, 2, 12), BF16, CPU)}, E4M3_OUT),
    (DECODE, DECODES, _LATENT, "dtype torch.float64 not supported"),
    (DECODE, DECODES, {"ql_nope": torch.zeros(4, 2, 512).bfloat16()}, r"ql_nope: expected at least 6 tokens of \[2, 5"),
    (DECODE, DECODES, {"kv_cache": torch.zeros(9, 4, 500).bfloat16()}, r"kv_cache: expected \[blocks, page, 576\] of"),
    (DECODE, DECODES, {"kv_cache": torch.zeros(9, 4, 576)}, "for auto, got .* of torch.float32"),
    (DECODE, DECODES, {"metadata": _SHORT_TABLE}, "a sequence of 9 tokens has 3 pages of 4, its row holds 2"),
    (SPARSE, (), {"topk_indices": lists().long()}, "topk_indices: expected lists of torch.int32, got torch.int64"),
    (SPARSE, (), {"topk_indices": lists()[:5]}, r"expected a list for each of 6 query tokens, got shape \[5, 16\]"),
    (SPARSE, (), {"topk_indices": lists(1, 2, 36)}, "topk_indices: expected 0 to 35, or -1, got 36 in row 1, column 2"),
    (f"{SPARSE};call=sparse_prefill", (), _GATHERED, "expected 0 to 4, or -1, got 5 in row 0, column 0"),
    (SPARSE, (), {"topk_length": int32(3, 3, 0, 17, 3, 3)}, "topk_length: expected 0 to 16, .*, got 17 in row 3"),
    (SPARSE, (), {"topk_length": torch.ones(6)}, r"topk_length: expected \[6\] of torch.int32, .* got \[6\] of"),
    (SPARSE, (), {"attn_sink": torch.zeros(3)}, r"attn_sink: expected \[2\] of .*, a logit for each head, got \[3\]"),
    (SPARSE, (), {"kv_cache": WIDE}, r"expected .* for auto, got .* of torch.uint8, which is as wide as fp8_ds_mla"),
    (SPARSE, (), {"kv_cache": WIDE[..., 56:]}, r"got \[9, 4, 600\] of .*, which is as wide as no layout of such keys"),
    (SPARSE, (), {"q": torch.zeros(6, 2, 512).bfloat16()}, r"q: expected 6 tokens of \[2, 576\] by the metadata"),
    (_SECOND, (), {"extra_topk_indices": None}, "extra_kv_cache: expected extra_topk_indices with it and"),
    (SPARSE, (torch_sdpa.TorchSDPASparseBackend,), {"attn_sink": torch.zeros(2)}, "TORCH_SDPA: sinks not supported"),
    (TOPK, (), {"logits": torch.zeros(6)}, r"logits: expected \[T, C\] with neighbouring columns, got \[6\]"),
    (TOPK, (), {"logits": torch.zeros(2, 6)[:, ::2]}, "with neighbouring columns, got .* of strides .6, 2."),
    (TOPK, (), {"metadata": lambda _: {"lengths": torch.ones(2).long()}}, r"lengths: expected \[2\] of .*int32, .*64"),
    (TOPK, (), {"metadata": lambda _: {"max_seq_len": 7}}, "max_seq_len: expected at most the 6 columns, got 7"),
    (TOPK, (), {"topk_tokens": 0}, "topk_tokens: expected a positive number, got 0"),
    (TOPK, (), {"logits": torch.zeros(2, 6).double()}, r"dtype torch\.float64 not supported"),
    (SCORES, (), {"q": torch.zeros(4, 32, 128)}, r"q: expected \[4, 32, 128\] of torch.float8_e4m3fn, got"),
    (SCORES, (), {"weights": torch.zeros(4, 1)}, r"weights: expected \[4, 32\] of torch.float32, got \[4, 1\]"),
    (SCORES, (), {"k": torch.zeros(5, 64, 128).byte()}, r"k: expected \[5, 64, 132\] .*, got \[5, 64, 128\]"),
    (SCORES, (), {"k_scale": torch.zeros(4)}, r"k_scale: expected None, since no gathered codes were given, got \[4\]"),
    (f"{SCORES};gathered=1", (), {"k_scale": None}, "k_scale: expected the scales of gathered codes, got None"),
    (SCORES.replace("logits", "topk"), (), {"topk_tokens": 0}, "topk_tokens: expected a positive number, got 0"),
    (PREPARE, (), {"k": torch.ones(3, 64)}, r"k: expected \[3, 64\] of torch.bfloat16, got \[3, 64\] of torch.float32"),
    (PREPARE, (), {"metadata": lambda _: {"cos_sin_cache": torch.ones(1, 8)}}, r"expected \[1, 16\] .*, got \[1, 8\]"),
]
EAGER: dict[Role, Any] = {Role.SPARSE: EagerSparseBackend, Role.TOPK: eager_topk.EagerTopKBackend}
EAGER |= {Role.INDEXER: EagerIndexerBackend, Role.PREPARE: EagerPrepareBackend}


@pytest.mark.parametrize(("text", "kernels", "changes", "said"), REFUSED)
def test_operands_that_do_not_fit_are_refused(text: str, kernels: Any, changes: Any, said: str) -> None:
    for kernel in kernels or (EAGER[Case.parse(text).role],):
        with pytest.raises(ValueError, match=said):
            called(kernel, text, **changes)


@pytest.mark.parametrize(
    ("kernel", "given", "said"),
    [
        (EagerSparseBackend, (2, 0.05, 512, 128, 64, 128, "fp7", None), "unknown cache layout 'fp7'; expected"),
        (EagerSparseBackend, (2, 0.05, 512, 128, 64, 128, "auto", None, "fp7"), "unknown cache layout 'fp7'; expected"),
        (EagerPrepareBackend, (2, 0.125, MODEL._replace(scale_format="e4"), None), "expected one of .*, got 'e4'"),
        (EagerCacheBackend, (8, 4, "fp5", "float32", None), "kv_cache_dtype: expected one of auto, fp8, .* got 'fp5'"),
        (EagerCacheBackend, (8, 4, "auto", "bf16", None), "tile_scales: expected one of float32, pow2, got 'bf16'"),
    ],
)
def test_layouts_and_scales_that_do_not_exist_are_refused(kernel: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernel(*given)


ONE_TOKEN: dict[str, Any] = {"supported_query_len": 1, "supports_nonuniform_queries": False}
ONE_TOKEN["get_supported_kernel_block_sizes"] = staticmethod(lambda: [64])


def test_reasons_come_in_the_order_of_vllm_beside_what_is_declared() -> None:
    config = interface.MLAPrefillSelectorConfig(torch.float16, PRESETS["glm"].head)
    picky: dict[str, Any] = {"supported_dtypes": [BF16], "supported_mla_dimensions": [PRESETS["r1"].head]}
    picky["supports_compute_capability"] = classmethod(lambda cls, device_capability: False)
    picky["missing_dependencies"] = classmethod(lambda cls: ["pip install picky"])
    made: Any = type("Picky", (EagerPrefillBackend,), picky)
    *others, dimensions = made.validate_configuration(DeviceCapability(8, 0), config)
    reasons = "compute capability 8.0 not supported | dtype torch.float16 not supported | "
    assert " | ".join(others) == f"{reasons}required dependencies not available: pip install picky"
    said = f"MLA dimensions {PRESETS['glm'].head} not supported (supported: {PRESETS['r1'].head})"
    assert dimensions.startswith(said)
    with pytest.raises(TypeError, match="abstract"):
        interface.MLAPrefillBackend(4, 1.0, 512, 128, 64, 128, None)  # type: ignore[abstract]
    # Fused output by its key, a rounding by its class, another kernel for a GPU.
    dims, key = (4, 1.0, 512, 128, 64, 128, None), interface.fp8_static_tensor_sym()
    eager, sdpa = (kernel(*dims) for kernel in PREFILLS)
    assert eager.supports_quant_output(key) and not sdpa.supports_quant_output(key)
    assert not eager.supports_quant_output(interface.QuantKey(torch.int8, key.scale))
    assert declaration_of(object) == Declaration(rounding=Rounding(lse=LseClass.EXACT))
    with pytest.raises(TypeError, match=r"Wrong\.declaration must be a Declaration, got dict"):
        declaration_of(type("Wrong", (), {"declaration": {"emulated": True}}))
    assert torch_sdpa.TorchSDPADecodeBackend.resolve(None) is torch_sdpa.TorchSDPADecodeBackend
    assert torch_sdpa.TorchSDPADecodeBackend.resolve(DeviceCapability(9, 0)) is torch_sdpa.TorchEfficientDecodeBackend
    assert (
        replace(torch_sdpa.TorchEfficientDecodeBackend.declaration, deviations=())
        != torch_sdpa.TorchSDPADecodeBackend.declaration
    )


def test_plans_that_contradict_their_batch_and_what_is_declared_unsupported_are_refused_by_the_call_too() -> None:
    for lengths in ((), (3, -1)):
        with pytest.raises(ValueError, match="expected one non-negative query length per request, got"):
            batch(*lengths)
    with pytest.raises(ValueError, match="context plan has 3 requests, the batch 2"):
        batch(5, 9, contexts=(40, 0, 70))
    with pytest.raises(ValueError, match="at least one context chunk, got none; pass chunked_context=None"):
        chunked_context_metadata([], torch.empty(64, 40), CPU)
    with pytest.raises(ValueError, match="chunk of 65 tokens does not fit a workspace of 64 tokens"):
        chunked_context_metadata([chunking.ContextChunk((0, 0), (1, 64))], torch.empty(64, 40), CPU)
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: block_size 4 not supported; 3 query tokens a request"):
        called(type("Narrow", (eager_decode.EagerDecodeBackend,), ONE_TOKEN), DECODE)
    one = type("Heads", (EagerSparseBackend,), {"supported_heads": [64]})
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: 2 heads not supported \(supported: \[64\]\)$"):
        called(one, SPARSE)
    once = type("Once", (EagerSparseBackend,), {"supports_duplicates": False})
    with pytest.raises(UnsupportedConfiguration, match="lists that name a key twice not supported"):
        called(once, SPARSE, topk_indices=lists(0, 1, 5))
    r1 = {"supported_mla_dimensions": [PRESETS["r1"].head]}
    for kernel in PREFILLS:
        with pytest.raises(UnsupportedConfiguration, match=r"MLA dimensions .*qk_nope_head_dim=16.* not supported"):
            called(type("Dims", (kernel,), r1), PREFILL)
    narrow: Any = type("Narrow", (EagerPrepareBackend,), {"supports_hadamard": [False], "supported_head_dims": [128]})
    reasons = narrow.validate_configuration(None, prepare.MLAPrepareSelectorConfig(BF16, 2, MODEL))
    assert reasons == ["head dim 64 not supported (supported: [128])", "hadamard=True not supported"]
