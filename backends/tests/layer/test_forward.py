"""The layer's forward, where it meets a profile run, an output buffer, or a part without a kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.kernel import UnsupportedConfiguration

PREFILLS = [(5, 0, True), (3, 0, True), (4, 0, True)]
DECODES = [(1, 0, False), (1, 0, False), (1, 0, False)]


def metadata_of(one: Any, profile: bool = False) -> Any:
    """Metadata of the first route with the state's workspace."""
    builder, state = one.world.builder(), one.world.backend.get_state_cls()(one.world.runner())
    builder.is_profile_run = profile
    metadata = builder.build_from_requests(one.requests)
    state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
    return metadata


def forward(one: Any, metadata: Any, cache: Any = None, **given: Any) -> Any:
    w = one.world
    return w.impl().forward(w.layer, *one.operands(), w.cache if cache is None else cache, metadata, **given)


def test_an_output_of_another_dtype_is_refused(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    said = r"expected an output \[3, 36\] of torch.float32, got \[3, 36\] of torch.float16"
    with pytest.raises(ValueError, match=said):
        forward(one, metadata_of(one), output=torch.zeros(3, 36).half())


def test_a_profile_run_computes_nothing_or_reserves(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS)
    assert forward(one, None, one.world.cache[:0]).abs().max() == 0
    reserving = metadata_of(one, profile=True)
    assert reserving.is_profile_run and torch.equal(forward(one, reserving), forward(one, metadata_of(one)))


def test_a_cache_without_elements_is_not_written(world: Any, batch: Any) -> None:
    one = batch(world(), PREFILLS)
    assert torch.equal(forward(one, metadata_of(one), torch.empty(0)), forward(one, metadata_of(one)))


@pytest.mark.parametrize("scale", ["output_scale", "output_block_scale"])
def test_a_quantised_output_is_refused(scale: str, world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    with pytest.raises(UnsupportedConfiguration, match="quantised output not supported; quantise the result"):
        forward(one, metadata_of(one), **{scale: torch.tensor(1.0)})


def test_fewer_rows_than_the_metadata_counts_are_refused(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    said = r"at least 3 tokens by the metadata.*got 2 of q, 2 of k_c_normed and 2 of k_pe"
    with pytest.raises(ValueError, match=said):
        one.world.impl().forward(one.world.layer, *(x[:2] for x in one.operands()), one.world.cache, metadata_of(one))


@pytest.mark.parametrize(("absent", "requests"), [("prefill", PREFILLS), ("decode", DECODES)])
def test_a_part_without_a_kernel_is_refused(absent: str, requests: Any, world: Any, batch: Any) -> None:
    one = batch(world(**{absent: None}), requests)
    said = f"batch has a {absent}, and the layer has no {absent} backend"
    with pytest.raises(UnsupportedConfiguration, match=said):
        forward(one, metadata_of(one))
