"""FlashInfer's wrappers, which plan, and cuDNN's graph, against stand-ins of each form."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends import decode, flashinfer, flashinfer_mla, roles
from mla_conformance.backends.cudnn import CudnnFp8, Key, layouts, lengths, offsets
from mla_conformance.backends.kernel import DeviceCapability, UnsupportedConfiguration
from mla_conformance.reference import quantization

OLD, NEW = "flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"
RAGGED: Any = flashinfer.FlashInferPrefillBackend.variants
PAGED: Any = flashinfer_mla.FlashInferMLADecodeBackend.variants


@pytest.fixture(params=[OLD, NEW])
def wrappers(request: Any, planned: Any, installed: Any, kernel: Any) -> list[Any]:
    """Ragged wrappers that were made; LSE to base 2, [T, N], unless another form is asked for."""
    made: list[Any] = []

    def run(wrapper: Any, a: Any) -> Any:
        plan = wrapper.planned
        starts = (plan["qo_indptr"], plan["kv_indptr"])
        assert a["q"].shape[0] == int(starts[0][-1])
        assert (plan["head_dim_qk"], plan["head_dim_vo"]) == (a["q"].shape[-1], a["v"].shape[-1])
        output, lse = kernel(a["q"], a["k"], a["v"], *starts, plan["sm_scale"], plan["causal"])
        assert plan["o_data_type"] == output.dtype
        if plan["q_data_type"] == torch.float8_e4m3fn:
            assert plan["head_dim_qk"] == plan["head_dim_vo"]
            scales = [(scale.dtype, scale.tolist()) for scale in a["args"]]
            assert scales == [(torch.float32, [1.0] * output.shape[1])] * 3
        lse = lse.clamp(min=-50000.0) if request.param == OLD else lse
        lse = lse if a.get("lse_base") == "ln" else lse / math.log(2)
        lse = lse if a.get("lse_layout") == "HN" else lse.mT.contiguous()
        return output if a["out"] is None else a["out"].copy_(output), lse

    name = "flashinfer/prefill.py:BatchPrefillWithRaggedKVCacheWrapper"
    wrapper = planned(request.param, name, run, lambda wrapper, a: made.append(wrapper))
    installed("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=wrapper)
    return made


@pytest.mark.parametrize("variant", RAGGED)
def test_conventions_of_prefill(variant: Any, wrappers: Any, conforms: Any, prepared: Any) -> None:
    subject = conforms(f"FLASHINFER[{variant}]")
    assert {w.planned["q_data_type"] for w in wrappers} == {torch.bfloat16}
    assert {(w.planned["head_dim_qk"], w.planned["head_dim_vo"]) for w in wrappers} == {(192, 128)}
    made, (kernel, call) = len(wrappers), prepared(subject, "new_tokens:heads=2;q=[3]")
    for _ in range(2):
        call.invoke(kernel, None)
    assert len(wrappers) == made + 1  # a plan serves every call of a batch


def test_operands_in_e4m3_have_one_head_dim_and_scales(wrappers: Any, conforms: Any) -> None:
    conforms("FLASHINFER[fa3]", "e4m3")
    assert {w.planned["head_dim_qk"] for w in wrappers} == {256}


@pytest.fixture(params=[OLD, NEW])
def library(request: Any, recorded: Any, planned: Any, installed: Any, mla_kernel: Any) -> Any:
    """A library whose paged wrapper keeps a plan in the buffers that it was given; LSE to base 2 unless asked."""
    version, made = request.param, []
    files = {OLD: "flashinfer/mla/_core.py", NEW: "flashinfer/mla/_batch_mla/_wrapper.py"}

    def run(wrapper: Any, a: Any) -> Any:
        flat = version == OLD
        q = (a["q_nope"], a["q_pe"]) if flat else a["query"]
        cache = (a["ckv_cache"], a["kpe_cache"]) if flat else a["kv_cache"]
        plan, buffers = wrapper.planned, wrapper.buffers
        lengths, indices = buffers["kv_len_arr"].tolist(), buffers["kv_indices"].tolist()
        tables = [indices[first:end] for first, end in pairwise(buffers["kv_indptr"].tolist())]
        queries, pages = buffers["qo_indptr"].diff().tolist(), torch.cat(cache, dim=-1)
        assert plan["causal"] == (max(queries) > 1) and plan["page_size"] == pages.shape[1]
        assert cache[0].untyped_storage().data_ptr() == cache[1].untyped_storage().data_ptr()
        output, lse = mla_kernel(torch.cat(q, dim=-1), pages, lengths, queries, tables, plan["sm_scale"])
        return output, (lse if a["return_lse_base_on_e"] else lse / math.log(2)).mT

    def begin(wrapper: Any, a: Any) -> None:
        assert a["use_cuda_graph"] and a["backend"] in ("fa2", "fa3")
        wrapper.buffers = {name: a[name] for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
        made.append(wrapper)

    def keep(wrapper: Any, a: Any) -> None:
        batch = a["metadata"] if version == NEW else a
        for name, buffer in wrapper.buffers.items():
            assert batch[name].dtype == torch.int32
            buffer[: len(batch[name])].copy_(batch[name])

    name = "BatchMLAPagedAttentionWrapper"
    contents: dict[str, Any] = {name: planned(version, f"{files[version]}:{name}", run, begin, keep)}
    if version == NEW:
        csr = recorded(version, "flashinfer/mla/_batch_mla/_contracts.py:MLAPlanMetadata.csr", dict)
        contents["MLAPlanMetadata"] = SimpleNamespace(csr=lambda **fields: csr(None, **fields))
    installed("flashinfer.mla", **contents)
    return SimpleNamespace(version=version, made=made)


@pytest.mark.parametrize("variant", PAGED)
@pytest.mark.parametrize("page", [1, 64])
def test_conventions_of_decode(variant: Any, page: Any, library: Any, passes: Any) -> None:
    batches = ["q=[1,1];kv=[64,129];pad=1", "q=[4,1,3];kv=[61,16,1]"][: 1 + (variant == "fa3")]
    cases = [f"decode:heads=2;page={page};{batch}" for batch in batches]
    passes(f"FLASHINFER_MLA[{variant}]", roles.Role.DECODE, *cases)


def test_the_plan_follows_the_metadata_before_the_next_call(library: Any, passes: Any, prepared: Any) -> None:
    """A replayed graph makes no call; it reads what prepare_metadata has left in the buffers of its shape's wrapper."""
    subject = passes("FLASHINFER_MLA[fa2]", roles.Role.DECODE)
    backend, call = prepared(subject, "decode:heads=2;page=16;q=[1,1];kv=[64,129]")
    call.invoke(backend, None)
    metadata = backend._decode_metadata
    metadata.seq_lens_cpu = torch.tensor([3, 40], dtype=torch.int32)
    backend.prepare_metadata(metadata)
    (wrapper,) = library.made
    assert wrapper.buffers["kv_len_arr"].tolist() == [3, 40]


def test_an_e4m3_cache_has_its_needs_and_hands_scales_over(library: Any, monkeypatch: Any) -> None:
    backend, hopper = PAGED["fa3"], DeviceCapability(9, 0)
    monkeypatch.setattr(backend, "libraries", ())
    config = decode.MLADecodeSelectorConfig(torch.bfloat16, "fp8", 64, 512, 64)
    assert bool(backend.validate_configuration(hopper, config)) == (library.version == OLD)
    assert backend.validate_configuration(hopper, config._replace(dtype=torch.float16))
    monkeypatch.setattr(PAGED["fa2"], "libraries", ())
    assert "needs compute capability 9.0" in PAGED["fa2"].validate_configuration(DeviceCapability(8, 0), config)[0]
    if library.version == OLD:
        return
    seen: dict[str, Any] = {}
    made = backend(2, 0.1, 512, 128, 64, 128, "fp8", None)
    wrapper = SimpleNamespace(run=lambda **a: seen.update(a) or (a["query"][0], torch.zeros(1, 2)))
    monkeypatch.setattr(made, "plan", lambda form: seen.update(form=form) or wrapper)
    q, pe = torch.zeros(1, 2, 512).bfloat16(), torch.zeros(1, 2, 64).bfloat16()
    made.attend(q, pe, torch.zeros(1, 16, 576).to(torch.float8_e4m3fn), torch.tensor(0.25))
    assert (seen["ckv_scale"], seen["kpe_scale"], seen["form"].cache_dtype) == (0.25, 0.25, torch.float8_e4m3fn)


def test_outputs_in_codes_are_divided_by_the_scale(passes: Any, prepared: Any, kernel: Any, monkeypatch: Any) -> None:
    def execute(key: Any, tensors: Any, batch: Any) -> str:
        """Multiplies by every scale, P's and its inverse among them; no plan is for one token."""
        assert key.max_query_len == max(2, *batch.query_lens) and key.max_key_len == max(2, *batch.key_lens)
        assert all(tensors[f"descale_{name}"].tolist() == [1.0] for name in "qkv")
        assert all(batch.query_lens) and batch.query_start_loc.diff().tolist() == list(batch.query_lens)
        assert float(tensors["scale_s"] * tensors["descale_s"]) == 1.0 and key.causal
        start = batch.query_start_loc
        output, lse = kernel(tensors["q"], tensors["k"], tensors["v"], start, start, key.scale, True)
        tensors["o"].copy_(quantization.quantize_e4m3(output.double() * float(tensors["scale_o"]), 1.0))
        tensors["stats"].copy_(lse.mT)
        return "plan"

    monkeypatch.setattr("mla_conformance.backends.cudnn.execute", execute)
    codes = "dtype=e4m3;heads=2;pad=1"
    batches = "q=[0,3,0,4]", "q=[1];lse=0"
    cases = (f"quant_output_fp8:call=new_tokens;{codes};quant=fp8;oscale=20000;{batch}" for batch in batches)
    subject = passes("CUDNN[fp8]", roles.Role.PREFILL, *cases)
    assert not CudnnFp8.supports_unquantised_output(torch.float8_e4m3fn)
    refused = {"new_tokens;q=[3]": "pass out in e4m3 and output_sc", "context_chunk;q=[3];kv=[4]": "chunk is bfloat16"}
    for call, said in refused.items():
        backend, asked = prepared(subject, f"fp8_operands:{codes};call={call}")
        with pytest.raises(UnsupportedConfiguration, match=said):
            asked.invoke(backend, None)


def test_layouts_carry_the_strides_of_a_view() -> None:
    strides = ((768, 192, 1), (768, 192, 1), (1024, 256, 1))
    key = Key(torch.device("cpu"), torch.bfloat16, 3, 4, 7, 9, (192, 128), strides, 0.1, True)
    found, start = layouts(key), torch.tensor([0, 3, 2**20], dtype=torch.int32)
    assert offsets(start, 2**12).shape == (3, 1, 1, 1)
    assert offsets(start, 2**12).flatten().tolist() == [0, 3 * 2**12, 2**32]  # elements, in 64 bits
    assert lengths(start).flatten().tolist() == [3, 2**20 - 3]
    assert found["q"] == ((3, 4, 7, 192), (768 * 7, 192, 768, 1))
    assert found["v"] == ((3, 4, 9, 128), (1024 * 9, 256, 1024, 1))
