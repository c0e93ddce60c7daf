"""The paged wrapper's adapter against stand-ins that follow FlashInfer before and after its metadata object."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.flashinfer_mla import FlashInferMLADecodeBackend
from mla_conformance.backends.platform import DeviceCapability

_OLD, _NEW = "flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"
_CLASS = "BatchMLAPagedAttentionWrapper"
_FILES = {_OLD: "flashinfer/mla/_core.py", _NEW: "flashinfer/mla/_batch_mla/_wrapper.py"}
_HOPPER = DeviceCapability(9, 0)
_BUFFERS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


@pytest.fixture(params=[_OLD, _NEW])
def library(request: Any, recorded: Any, installed: Any, mla_kernel: Any) -> Any:
    """A library whose wrapper keeps a plan in the buffers that it was given, and answers to base 2 unless asked."""
    version, made = request.param, []

    def run(wrapper: Any, a: Any) -> Any:
        q, cache = (a.get("query"), a.get("kv_cache")) if version == _NEW else _flat(a)
        plan, buffers = wrapper.planned, wrapper.buffers
        lengths, offsets = buffers["kv_len_arr"].tolist(), buffers["kv_indptr"].tolist()
        indices = buffers["kv_indices"].tolist()
        tables = [indices[a:b] for a, b in pairwise(offsets)]
        queries = buffers["qo_indptr"].diff().tolist()
        assert plan["causal"] == (max(queries) > 1)
        assert cache[0].untyped_storage().data_ptr() == cache[1].untyped_storage().data_ptr()
        pages = torch.cat(cache, dim=-1)
        assert plan["page_size"] == pages.shape[1]
        output, lse = mla_kernel(torch.cat(q, dim=-1), pages, lengths, queries, tables, plan["sm_scale"])
        return output, (lse if a["return_lse_base_on_e"] else lse / math.log(2)).mT

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            file = _FILES[version]
            recorded(version, f"{file}:{_CLASS}.__init__", self._begin)(self, *args, **kwargs)
            self.run = recorded(version, f"{file}:{_CLASS}.run", lambda a: run(self, a)).__get__(self)
            self.plan = recorded(version, f"{file}:{_CLASS}.plan", self._keep).__get__(self)

        def _begin(self, a: Any) -> None:
            assert a["use_cuda_graph"] and a["backend"] in ("fa2", "fa3")
            self.buffers = {name: a[name] for name in _BUFFERS}
            made.append(self)

        def _keep(self, a: Any) -> None:
            self.planned = dict(a)
            batch = a["metadata"] if version == _NEW else a
            for name, buffer in self.buffers.items():
                assert batch[name].dtype == torch.int32
                buffer[: len(batch[name])].copy_(batch[name])

    Wrapper.run = recorded(version, f"{_FILES[version]}:{_CLASS}.run", None)
    contents: dict[str, Any] = {_CLASS: Wrapper}
    if version == _NEW:
        csr = recorded(version, "flashinfer/mla/_batch_mla/_contracts.py:MLAPlanMetadata.csr", dict)
        contents["MLAPlanMetadata"] = SimpleNamespace(csr=lambda **fields: csr(None, **fields))
    installed("flashinfer.mla", **contents)
    return SimpleNamespace(version=version, made=made)


def _flat(a: Any) -> Any:
    return (a["q_nope"], a["q_pe"]), (a["ckv_cache"], a["kpe_cache"])


@pytest.mark.parametrize("variant", FlashInferMLADecodeBackend.variants)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_conventions(variant: Any, page: Any, library: Any, decodes: Any) -> None:
    decodes(FlashInferMLADecodeBackend.variants[variant], page, (1, 1, 1), (65, 0, 130))


def test_several_queries_a_request(library: Any, decodes: Any) -> None:
    decodes(FlashInferMLADecodeBackend.variants["fa3"], 16, (4, 1, 3), (65, 17, 4))


def test_one_wrapper_serves_every_batch_of_its_shape(library: Any, decodes: Any) -> None:
    decodes(FlashInferMLADecodeBackend.variants["fa2"], 16, (1, 1), (65, 130))
    assert len(library.made) == 1


def test_the_plan_follows_the_metadata_before_the_next_call(library: Any, decodes: Any) -> None:
    """A replayed graph makes no call; it reads what prepare_metadata has left in the buffers."""
    backend = decodes(FlashInferMLADecodeBackend.variants["fa2"], 16, (1, 1), (65, 130))
    metadata = backend._decode_metadata
    metadata.seq_lens_cpu = torch.tensor([3, 40], dtype=torch.int32)
    backend.prepare_metadata(metadata)
    (wrapper,) = library.made
    assert wrapper.buffers["kv_len_arr"].tolist() == [3, 40]


def test_an_e4m3_cache_needs_the_newer_version_hopper_and_bfloat16(library: Any, monkeypatch: Any) -> None:
    backend = FlashInferMLADecodeBackend.variants["fa3"]
    monkeypatch.setattr(backend, "libraries", ())
    config = MLADecodeSelectorConfig(torch.bfloat16, "fp8", 64, 512, 64)
    reasons = backend.validate_configuration(_HOPPER, config)
    assert bool(reasons) == (library.version == _OLD)
    assert backend.validate_configuration(_HOPPER, config._replace(dtype=torch.float16))
    fa2 = FlashInferMLADecodeBackend.variants["fa2"]
    monkeypatch.setattr(fa2, "libraries", ())
    assert "needs compute capability 9.0" in fa2.validate_configuration(DeviceCapability(8, 0), config)[0]


def test_scales_of_an_e4m3_cache_reach_the_kernel(library: Any) -> None:
    if library.version == _OLD:
        pytest.skip("0.6.13 reads no e4m3 cache")
    backend = FlashInferMLADecodeBackend.variants["fa3"](2, 0.1, 512, 128, 64, 128, "fp8", None)
    seen: dict[str, Any] = {}
    wrapper = SimpleNamespace(run=lambda **a: seen.update(a) or (a["query"][0], torch.zeros(1, 2)))
    backend.plan = lambda form: seen.update(form=form) or wrapper  # type: ignore[method-assign]
    q, pe = torch.zeros(1, 2, 512).bfloat16(), torch.zeros(1, 2, 64).bfloat16()
    backend.attend(q, pe, torch.zeros(1, 16, 576).to(torch.float8_e4m3fn), torch.tensor(0.25))
    assert (seen["ckv_scale"], seen["kpe_scale"], seen["form"].cache_dtype) == (0.25, 0.25, torch.float8_e4m3fn)


def test_choice_by_device(monkeypatch: Any) -> None:
    monkeypatch.setattr(FlashInferMLADecodeBackend, "libraries", ())
    chosen: list[Any] = [FlashInferMLADecodeBackend.resolve(DeviceCapability(*c)) for c in ((8, 0), (9, 0), (10, 0))]
    assert [backend.variant for backend in chosen] == ["fa2", "fa3", "fa2"]
