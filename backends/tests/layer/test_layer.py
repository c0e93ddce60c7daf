"""The composed backend, the implementation's construction, weights, ranks, and the layer from hidden states on."""

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.attention_types import AttentionType
from mla_conformance.backends.layer.context_parallel import Sharding, local_seq_lens, local_token
from mla_conformance.backends.layer.mla_batch import LayerRequest
from mla_conformance.backends.layer.mla_layer import MLACommonBackend, mla_backend
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.layer import LayerSpec, mla_layer
from mla_conformance.reference.projections import MLAWeights, kv_b_proj
from mla_conformance.reference.rope import Rotation, rope


def validate(backend: type[MLACommonBackend], **changes: Any) -> list[str]:
    settings: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "device_capability": None,
        "attn_type": AttentionType.DECODER,
    }
    return backend.validate_configuration(**(settings | changes))


def test_the_layer_of_two_kernels(world: Any) -> None:
    w = world()
    assert w.backend.get_name() == "EAGER+EXACT" and issubclass(w.backend, MLACommonBackend) and w.backend.is_mla()
    assert w.backend.get_impl_cls() is w.backend.get_impl_cls()
    assert (
        w.backend.get_impl_cls().__name__ == "MLACommonImpl"
        and w.backend.get_metadata_cls().__name__ == "MLACommonMetadata"
    )
    assert mla_backend(EagerPrefillBackend, None).get_name() == "EAGER" and MLACommonBackend.get_name() == "MLA_COMMON"
    assert w.backend.get_supported_head_sizes() == [] and MLACommonBackend.get_supported_head_sizes() == [576]
    with pytest.raises(ValueError, match="expected a prefill or a decode backend, got neither"):
        mla_backend(None, None)


def test_validation_asks_both_kernels(world: Any) -> None:
    backend = world().backend
    assert validate(backend) == [] and validate(backend, kv_cache_dtype="fp8_ds_mla") == []
    assert validate(backend, use_mla=False) == ["non-MLA not supported"]
    assert "latents and rope keys of 512" in validate(backend, head_size=320, kv_cache_dtype="fp8_ds_mla")[0]
    assert (
        "bfloat16 or float16, got torch.float32"
        in validate(backend, dtype=torch.float32, kv_cache_dtype="fp8_ds_mla")[-1]
    )
    assert validate(backend, kv_cache_dtype="fp8_e4m3") == validate(backend, kv_cache_dtype="bfloat16") == []
    assert "expects a model of bfloat16" in validate(backend, dtype=torch.float16, kv_cache_dtype="bfloat16")[0]
    cpu_only = mla_backend(TorchSDPAPrefillBackend, None)
    assert validate(cpu_only, device_capability=(9, 0)) == ["compute capability not supported: got (9, 0)"]
    missing = type("Missing", (world().decode,), {"missing_dependencies": classmethod(lambda cls: ["pip install x"])})
    assert validate(mla_backend(None, missing)) == ["required dependencies not available: pip install x"]


def test_the_cache_of_the_layer() -> None:
    shape = MLACommonBackend.get_kv_cache_shape
    assert shape(7, 64, 1, 576) == (7, 64, 576) == shape(7, 64, 1, 576, "fp8")
    assert shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656) and shape(7, 4, 1, 40) == (7, 4, 40)
    with pytest.raises(ValueError, match="num_kv_heads 1, all heads share a latent, got 8"):
        shape(7, 64, 8, 576)
    assert MLACommonBackend.get_kv_cache_stride_order() == (0, 1, 2)
    assert sorted(MLACommonBackend.get_kv_cache_stride_order(True)) == [0, 1, 2, 3]
    cache = torch.arange(8.0).reshape(4, 2, 1)
    MLACommonBackend.copy_blocks([cache], torch.tensor([[3, 0]]))
    assert cache[0].flatten().tolist() == [6, 7]


@pytest.mark.parametrize(
    "setting",
    [
        {"alibi_slopes": [0.5]},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"kv_sharing_target_layer_name": "layer.3"},
        {"attn_type": "encoder"},
        {"indexer": object()},
    ],
)
def test_what_a_latent_layer_has_no_meaning_for_is_refused(setting: Any, world: Any) -> None:
    name = next(iter(setting))
    with pytest.raises(UnsupportedConfiguration, match=f"an MLA layer does not support {name}, got"):
        world().impl(**setting)


def test_sizes_that_do_not_fit_together_are_refused(world: Any) -> None:
    for name, got, expected in (("head_size", 41, 40), ("qk_head_dim", 25, 24), ("num_kv_heads", 3, 1)):
        with pytest.raises(ValueError, match=f"expected {name} {expected} for L = 32.*, got {got}"):
            world().impl(**{name: got})
    with pytest.raises(ValueError, match="expected a cache dtype of auto, fp8, fp8_ds_mla, got 'int8'"):
        world().impl(kv_cache_dtype="int8")
    plain = type("Plain", (world().decode,), {"supported_kv_cache_dtypes": ["auto"]})
    with pytest.raises(UnsupportedConfiguration, match=r"EXACT: cache dtype fp8 not supported \(supported: auto\)"):
        world(decode=plain).impl(kv_cache_dtype="fp8")


def test_the_weights_are_the_halves_of_the_projection(world: Any) -> None:
    w = world()
    impl = w.impl()
    assert impl.W_UK_T.equal(w.weight[..., :16].permute(1, 2, 0)) and impl.W_UV.equal(
        w.weight[..., 16:].transpose(0, 1)
    )
    impl.process_weights_after_loading(torch.float16)
    assert impl.W_UV.dtype == torch.float16


def test_quantised_weights_are_asked_for_their_image_of_the_identity(world: Any) -> None:
    w = world()
    dense = w.weight.flatten(1).mT.contiguous()

    class Quantised:
        qweight = torch.zeros(84, 32, dtype=torch.int8)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ dense.mT

    impl = w.impl(kv_b_proj=Quantised())
    torch.testing.assert_close(impl.W_UV, w.weight[..., 16:].transpose(0, 1))


def test_a_quantised_projection_is_asked_without_its_bias(world: Any) -> None:
    w = world()
    dense = w.weight.flatten(1).mT.contiguous()

    class Method:
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x @ dense.mT if bias is None else x @ dense.mT + bias

    class Quantised:
        qweight = torch.zeros(84, 32, dtype=torch.int8)
        bias = torch.ones(84)

    with pytest.raises(ValueError, match="without a bias, or a quant_method that can leave it out"):
        w.impl(kv_b_proj=Quantised())
    Quantised.quant_method = Method()  # type: ignore[attr-defined]
    torch.testing.assert_close(w.impl(kv_b_proj=Quantised()).W_UV, w.weight[..., 16:].transpose(0, 1))


def test_a_projection_of_another_shape_is_refused(world: Any) -> None:
    with pytest.raises(
        ValueError, match=r"kv_b_proj weight \[N·\(P \+ V\), L\] = \[84, 32\] for N = 3.* got \[32, 84\]"
    ):
        world().impl(kv_b_proj=SimpleNamespace(weight=torch.zeros(32, 84)))
    with pytest.raises(ValueError, match="one of the attributes weight, qweight, weight_packed, got a SimpleNamespace"):
        world().impl(kv_b_proj=SimpleNamespace())


@pytest.mark.parametrize("interleave", [1, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_lengths_and_tokens_agree(ranks: int, interleave: int) -> None:
    lengths = torch.arange(40)
    token = torch.arange(39)
    total = torch.zeros(40, dtype=torch.long)
    for rank in range(ranks):
        sharding = Sharding(ranks, rank, interleave)
        owner, local = local_token(token, sharding)
        mine = local[owner == rank]
        assert mine.tolist() == list(range(len(mine)))
        held = local_seq_lens(lengths, sharding)
        assert held.tolist() == [int((owner[:n] == rank).sum()) for n in range(40)]
        total += held
    assert total.equal(lengths)


def test_lengths_of_a_rank_may_come_with_the_batch(world: Any, batch: Any) -> None:
    common = batch(world(), [(1, 4, False), (1, 7, False)]).common()
    w = world(ranks=2)
    assert w.builder(1).build(0, common).decode_metadata.seq_lens.tolist() == [2, 4]
    common.dcp_local_seq_lens = torch.tensor([2, 4], dtype=torch.int32)
    view = w.builder(1).build(0, common).decode_metadata
    assert view.seq_lens.data_ptr() == common.dcp_local_seq_lens.data_ptr() and view.seq_lens_cpu.tolist() == [2, 4]


@pytest.mark.parametrize("path", ["compute_friendly", "data_movement_friendly", "chunked_prefill"])
def test_from_hidden_states_to_hidden_states(path: Any, world: Any) -> None:
    """Projections, rope, cache, prefill and decode in one mixed batch; the golden layer by each of its routes."""
    model, generator = PRESETS["small"], torch.Generator().manual_seed(3)
    w = world(dims=type(world().dims)(heads=4, nope=16, rope=8, value=16, latent=32))
    turn = Rotation.plain(model.head.qk_rope_head_dim, interleaved=True)
    spec = LayerSpec(model="small", dims=model, scale=w.scale, rotation=turn)
    shapes: dict[str, Any] = {name: shape for name, (shape,) in spec.weight_shapes.items()}
    weights = MLAWeights(**{
        name: shape and torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        for name, shape in shapes.items()
    })  # fmt: skip
    queries, contexts = (4, 3, 1, 2), (9, 0, 14, 5)
    starts, context_starts = [0, *accumulate(queries)], [0, *accumulate(contexts)]
    history = torch.randn(sum(contexts), model.hidden_size, generator=generator, dtype=torch.float64)
    hidden = torch.randn(sum(queries), model.hidden_size, generator=generator, dtype=torch.float64)
    blocks = torch.randperm(64, generator=generator)[:20].reshape(4, 5)
    past = torch.cat([torch.arange(c) for c in contexts])
    new = torch.cat([torch.arange(c, c + q) for q, c in zip(queries, contexts, strict=True)])

    w.weight = kv_b_proj(weights.W_UK, weights.W_UV).float()
    latents = torch.cat((history @ weights.W_DKV, rope(history @ weights.W_KR, past, turn)), dim=-1)
    for row, (start, stop) in enumerate(pairwise(context_starts)):
        token = torch.arange(stop - start)
        w.cache[blocks[row][token // 4], token % 4] = latents[start:stop].float()
    cached = PagedContext(w.cache.clone(), blocks, contexts, workspace_tokens=16)

    assert weights.W_DQ is not None
    q_c = hidden @ weights.W_DQ
    q_pe = rope(torch.einsum("tl,lnr->tnr", q_c, weights.W_QR), new, turn)
    q = torch.cat((torch.einsum("tl,lnp->tnp", q_c, weights.W_UQ), q_pe), dim=-1).float()
    kv_c, k_pe = (hidden @ weights.W_DKV).float(), rope(hidden @ weights.W_KR, new, turn).float()
    requests = [LayerRequest(queries[i], contexts[i], blocks[i].tolist(), i < 2) for i in range(4)]
    metadata = w.builder().build_from_requests(requests)
    metadata.bind_workspace(w.builder().workspace)
    result = w.impl().forward(w.layer, q.flatten(1), kv_c, k_pe.unsqueeze(1), w.cache, metadata)

    want = mla_layer(hidden, new, weights, spec, query_start_loc=starts, context=cached, path=path)
    torch.testing.assert_close(result.double() @ weights.W_O, want, atol=2e-5, rtol=2e-5)
