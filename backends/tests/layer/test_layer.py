"""The composed backend: construction, weights, ranks, its forward at a profile run or without a kernel, its cache."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.attention_impl import AttentionType
from mla_conformance.backends.layer.mla_layer import MLACommonBackend, mla_backend
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend


def validate(backend: type[MLACommonBackend], **changes: Any) -> list[str]:
    settings: dict[str, Any] = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64}
    settings |= {"use_mla": True, "has_sink": False, "use_sparse": False, "use_mm_prefix": False}
    settings |= {"device_capability": None, "attn_type": AttentionType.DECODER}
    return backend.validate_configuration(**(settings | changes))


def test_validation_asks_both_kernels(world: Any) -> None:
    backend = world().backend
    asked, wide = partial(validate, backend), {"dtype": torch.float32, "kv_cache_dtype": "fp8_ds_mla"}
    assert validate(backend) == [] and validate(backend, kv_cache_dtype="fp8_ds_mla") == []
    assert validate(backend, use_mla=False) == ["non-MLA not supported"]
    assert "latents and rope keys of 512" in validate(backend, head_size=320, kv_cache_dtype="fp8_ds_mla")[0]
    assert "bfloat16 or float16, got torch.float32" in asked(**wide)[-1]
    assert asked(kv_cache_dtype="fp8_e4m3") == asked(kv_cache_dtype="bfloat16") == []
    assert "expects a model of bfloat16" in validate(backend, dtype=torch.float16, kv_cache_dtype="bfloat16")[0]
    cpu_only = mla_backend(TorchSDPAPrefillBackend, None)
    assert validate(cpu_only, device_capability=(9, 0)) == ["compute capability not supported: got (9, 0)"]
    missing = type("Missing", (world().decode,), {"missing_dependencies": classmethod(lambda cls: ["pip install x"])})
    assert validate(mla_backend(None, missing)) == ["required dependencies not available: pip install x"]


def test_what_a_latent_layer_has_no_meaning_for_or_does_not_fit_is_refused(world: Any) -> None:
    settings: dict[str, Any] = {"alibi_slopes": [0.5], "sliding_window": 128, "logits_soft_cap": 30.0}
    settings |= {"kv_sharing_target_layer_name": "layer.3", "attn_type": "encoder", "indexer": object()}
    for name, value in settings.items():
        with pytest.raises(UnsupportedConfiguration, match=f"an MLA layer does not support {name}, got"):
            world().impl(**{name: value})
    for name, got, expected in (("head_size", 41, 40), ("qk_head_dim", 25, 24), ("num_kv_heads", 3, 1)):
        with pytest.raises(ValueError, match=f"expected {name} {expected} for L = 32.*, got {got}"):
            world().impl(**{name: got})
    with pytest.raises(ValueError, match="unknown cache layout 'int8'; expected one of auto, fp8"):
        world().impl(kv_cache_dtype="int8")
    plain = type("Plain", (world().decode,), {"supported_kv_cache_dtypes": ["auto"]})
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: cache dtype fp8 not supported \(supported: auto\)"):
        world(decode=plain).impl(kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"kv_b_proj weight \[N·\(P \+ V\), L\] = \[84, 32\] for N = 3.* got \[32, 8"):
        world().impl(kv_b_proj=SimpleNamespace(weight=torch.zeros(32, 84)))
    with pytest.raises(ValueError, match="one of the attributes weight, qweight, weight_packed, got a SimpleNamespace"):
        world().impl(kv_b_proj=SimpleNamespace())


def test_quantised_weights_are_asked_for_their_image_and_lengths_of_a_rank_may_come_with_the_batch(
    world: Any, batch: Any
) -> None:
    w = world()
    dense = w.weight.flatten(1).mT.contiguous()

    class Quantised:
        qweight = torch.zeros(84, 32, dtype=torch.int8)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ dense.mT

    class Method:
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x @ dense.mT if bias is None else x @ dense.mT + bias

    plain = w.impl()
    assert plain.W_UK_T.equal(w.weight[..., :16].permute(1, 2, 0))
    assert plain.W_UV.equal(w.weight[..., 16:].transpose(0, 1))
    torch.testing.assert_close(w.impl(kv_b_proj=Quantised()).W_UV, plain.W_UV)
    Quantised.bias = torch.ones(84)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="without a bias, or a quant_method that can leave it out"):
        w.impl(kv_b_proj=Quantised())
    Quantised.quant_method = Method()  # type: ignore[attr-defined]
    torch.testing.assert_close(w.impl(kv_b_proj=Quantised()).W_UV, plain.W_UV)
    plain.process_weights_after_loading(torch.float16)
    assert plain.W_UV.dtype == torch.float16
    common = batch(world(), [(1, 4, False), (1, 7, False)]).common()
    w = world(ranks=2)
    assert w.builder(1).build(0, common).decode_metadata.seq_lens.tolist() == [2, 4]
    common.dcp_local_seq_lens = torch.tensor([2, 4], dtype=torch.int32)
    view = w.builder(1).build(0, common).decode_metadata
    assert view.seq_lens.data_ptr() == common.dcp_local_seq_lens.data_ptr() and view.seq_lens_cpu.tolist() == [2, 4]


PREFILLS = [(5, 0, True), (3, 0, True), (4, 0, True)]
DECODES = [(1, 0, False), (1, 0, False), (1, 0, False)]
ONE = torch.tensor(1.0)


def metadata_of(one: Any, profile: bool = False) -> Any:
    builder, state = one.world.builder(), one.world.backend.get_state_cls()(one.world.runner())
    builder.is_profile_run = profile
    metadata = builder.build_from_requests(one.requests)
    state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
    return metadata


def forward(one: Any, metadata: Any, cache: Any = None, rows: int | None = None, **given: Any) -> Any:
    w, operands = one.world, (x[:rows] for x in one.operands())
    return w.impl().forward(w.layer, *operands, w.cache if cache is None else cache, metadata, **given)


def test_a_profile_run_computes_nothing_or_reserves_and_what_has_no_place_is_refused(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS)
    assert forward(one, None, one.world.cache[:0]).abs().max() == 0
    reserving, computed = metadata_of(one, profile=True), forward(one, metadata_of(one))
    assert reserving.is_profile_run and torch.equal(forward(one, reserving), computed)
    assert torch.equal(forward(one, metadata_of(one), torch.empty(0)), computed)
    one = batch(world(), DECODES)
    metadata = metadata_of(one)
    for given, said in (
        ({"output": torch.zeros(3, 36).half()}, r"an output \[3, 36\] of torch.float32, got .* of torch.float16"),
        ({"rows": 2}, "at least 3 tokens by the metadata.*got 2 of q, 2 of k_c_normed and 2 of k_pe"),
        ({"output_scale": ONE}, "quantised output not supported; quantise the result"),
        ({"output_block_scale": ONE}, "quantised output not supported; quantise the result"),
    ):
        with pytest.raises(ValueError, match=said):
            forward(one, metadata, **given)
    for absent, requests in (("prefill", PREFILLS), ("decode", DECODES)):
        lacking = batch(world(**{absent: None}), requests)
        said = f"batch has a {absent}, and the layer has no {absent} backend"
        with pytest.raises(UnsupportedConfiguration, match=said):
            forward(lacking, metadata_of(lacking))
