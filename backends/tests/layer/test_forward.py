"""The layer's forward, where it meets padding, an output buffer, or a part without a kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_layer import MLACommonBackend

PREFILLS = [(5, 0, True), (3, 6, True), (4, 21, True)]
DECODES = [(1, 0, False), (1, 7, False), (1, 12, False)]


def forward(batch: Any, metadata: Any, impl: Any = None) -> torch.Tensor:
    batch.store_context()
    impl = impl or batch.world.impl()
    return impl.forward(batch.world.layer, *batch.operands(), batch.world.cache, metadata)


def bind(world: Any, metadata: Any) -> Any:
    """Metadata of the first route with the state's workspace."""
    state = world.backend.get_state_cls()(world.runner())
    state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
    return metadata


def from_requests(batch: Any, pad: int = -1) -> Any:
    return bind(batch.world, batch.world.builder().build_from_requests(batch.requests, pad))


def assert_golden(result: torch.Tensor, batch: Any) -> None:
    tolerance = 2e-2 if batch.world.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.double(), batch.golden(), atol=tolerance, rtol=tolerance)


def test_padding_is_zero_and_writes_nothing(layout_world: Any, batch: Any) -> None:
    one = batch(layout_world, DECODES, padding=5)
    metadata = layout_world.builder().build_from_requests(one.requests, 5)
    one.store_context()
    before = layout_world.cache.clone()
    result = layout_world.impl().forward(layout_world.layer, *one.operands(), layout_world.cache, metadata)
    assert metadata.use_cuda_graph and metadata.num_decodes == metadata.num_decode_tokens == 8
    assert metadata.context_lens_tensor.tolist() == [0, 7, 12, 0, 0, 0, 0, 0]
    assert result[3:].abs().max() == 0
    assert_golden(result, one)
    written = (layout_world.cache.view(torch.uint8) != before.view(torch.uint8)).flatten(2).any(dim=-1)
    assert int(written.sum()) == 3


def test_rows_that_the_metadata_does_not_count_are_zero(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS + DECODES)
    metadata = from_requests(one)
    one.store_context()
    behind = [torch.cat((x, x.new_full((2, *x.shape[1:]), torch.nan))) for x in one.operands()]
    result = one.world.impl().forward(one.world.layer, *behind, one.world.cache, metadata)
    assert result[-2:].abs().max() == 0
    assert_golden(result[:-2], one)


def test_the_output_may_be_given(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    metadata = from_requests(one)
    one.store_context()
    out = torch.full((3, 36), torch.nan)
    result = one.world.impl().forward(one.world.layer, *one.operands(), one.world.cache, metadata, output=out)
    assert result.data_ptr() == out.data_ptr()
    assert_golden(out, one)
    with pytest.raises(
        ValueError, match=r"expected an output \[3, 36\] of torch.float32, got \[3, 36\] of torch.float16"
    ):
        one.world.impl().forward(one.world.layer, *one.operands(), one.world.cache, metadata, output=out.half())


def test_a_profile_run_computes_nothing_or_reserves(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS)
    assert one.world.impl().forward(one.world.layer, *one.operands(), one.world.cache[:0], None).abs().max() == 0
    builder = one.world.builder()
    builder.is_profile_run = True
    metadata = bind(one.world, builder.build_from_requests(one.requests))
    assert metadata.is_profile_run
    assert_golden(forward(one, metadata), one)


def test_a_cache_without_elements_is_not_written(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS[:1])
    result = one.world.impl().forward(one.world.layer, *one.operands(), torch.empty(0), from_requests(one))
    assert_golden(result, one)


def test_a_quantised_output_is_refused(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    impl = one.world.impl()
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(UnsupportedConfiguration, match="quantised output not supported; quantise the result"):
            impl.forward(
                one.world.layer, *one.operands(), one.world.cache, from_requests(one), **{scale: torch.tensor(1.0)}
            )


def test_fewer_rows_than_the_metadata_counts_are_refused(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    q, kv_c, k_pe = one.operands()
    with pytest.raises(
        ValueError, match=r"at least 3 tokens by the metadata.*got 2 of q, 2 of k_c_normed and 2 of k_pe"
    ):
        one.world.impl().forward(one.world.layer, q[:2], kv_c[:2], k_pe[:2], one.world.cache, from_requests(one))


def test_a_part_without_a_kernel_is_refused(world: Any, batch: Any) -> None:
    for absent, requests in (("prefill", PREFILLS), ("decode", DECODES)):
        one = batch(world(**{absent: None}), requests)
        with pytest.raises(
            UnsupportedConfiguration, match=f"batch has a {absent}, and the layer has no {absent} backend"
        ):
            forward(one, from_requests(one))


def test_a_subclass_may_replace_one_step(world: Any, batch: Any) -> None:
    class Halved(MLACommonImpl):
        def _v_up_proj(self, x: torch.Tensor) -> torch.Tensor:
            return super()._v_up_proj(x) / 2

    class HalvedLayer(MLACommonBackend):
        impl_class = Halved

    one = batch(world(base=HalvedLayer), DECODES)
    torch.testing.assert_close(forward(one, from_requests(one)).double() * 2, one.golden(), atol=1e-5, rtol=1e-5)


def test_a_shared_step_order_does_not_matter(world: Any, batch: Any) -> None:
    """Two batches in turn through one instance: each forward prepares its own."""
    shared = world()
    first, second = batch(shared, PREFILLS), batch(shared, DECODES, seed=500)
    impl = shared.impl()
    prepared = [(one, from_requests(one)) for one in (first, second)]
    for one, metadata in (*prepared, *prepared):
        assert_golden(forward(one, metadata, impl), one)
