"""Refusals before a launch: undeclared operands, and shapes that contradict the metadata."""

import pytest
import torch

from mla_conformance.backends.checks import check_operands, check_unquantised
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.interface import MLADimensions, MLAPrefillBackend, UnsupportedConfiguration
from mla_conformance.backends.metadata import prefill_metadata
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend

both = pytest.mark.parametrize("kernel", [EagerPrefillBackend, TorchSDPAPrefillBackend])


def instance(kernel: type[MLAPrefillBackend] = EagerPrefillBackend) -> MLAPrefillBackend:
    backend = kernel(2, 0.2, 32, 16, 8, 12, None)
    table = torch.zeros(1, 1, dtype=torch.int32)
    backend.prepare_metadata(
        prefill_metadata((5,), block_table=table, dtype=torch.bfloat16, device=torch.device("cpu"))
    )
    return backend


def operands(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(5, 2, width, dtype=dtype) for name, width in (("q", 24), ("k", 24), ("v", 12))}


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("q", (4, 2, 24), r"q: expected at least 5 tokens of \[2, 24\] by the metadata, got shape \[4, 2, 24\]"),
        ("k", (5, 3, 24), r"k: expected .* got shape \[5, 3, 24\]"),
        ("v", (5, 2, 24), r"v: expected at least 5 tokens of \[2, 12\]"),
        ("v", (10, 12), r"v: expected .* got shape \[10, 12\]"),
    ],
)
@both
def test_a_shape_that_contradicts_the_metadata(
    kernel: type[MLAPrefillBackend], name: str, shape: tuple[int, ...], said: str
) -> None:
    tensors = {**operands(), name: torch.zeros(shape, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=said):
        instance(kernel).run_prefill_new_tokens(**tensors, return_softmax_lse=True)


def test_rows_after_the_last_request_are_allowed() -> None:
    tensors = operands()
    check_operands(instance(), **tensors, query_tokens=3, key_tokens=4)
    with pytest.raises(ValueError, match="k: expected at least 6 tokens"):
        check_operands(instance(), **tensors, query_tokens=3, key_tokens=6)


@both
def test_an_undeclared_dtype(kernel: type[MLAPrefillBackend]) -> None:
    with pytest.raises(
        UnsupportedConfiguration, match=r"dtype torch\.float64 not supported \(supported: torch\.float16"
    ):
        instance(kernel).run_prefill_new_tokens(**operands(torch.float64), return_softmax_lse=True)


@both
def test_undeclared_head_dims(kernel: type[MLAPrefillBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    only = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    monkeypatch.setattr(kernel, "supported_mla_dimensions", [only])
    with pytest.raises(UnsupportedConfiguration, match=r"MLA dimensions .*qk_nope_head_dim=16.* not supported"):
        instance(kernel).run_prefill_new_tokens(**operands(), return_softmax_lse=True)


def test_an_output_scale_without_a_quantised_output() -> None:
    check_unquantised(instance(), None)
    with pytest.raises(UnsupportedConfiguration, match="TORCH_SDPA: quantised output not supported"):
        instance(TorchSDPAPrefillBackend).run_prefill_new_tokens(
            **operands(), return_softmax_lse=False, output_scale=torch.tensor(0.1)
        )


@pytest.mark.parametrize("out", [None, torch.zeros(5, 2, 12, dtype=torch.bfloat16)])
def test_an_output_scale_needs_an_e4m3_out_tensor(out: torch.Tensor | None) -> None:
    with pytest.raises(
        UnsupportedConfiguration, match=r"expects a float8_e4m3fn out tensor, got (none|torch\.bfloat16)"
    ):
        instance().run_prefill_new_tokens(
            **operands(), return_softmax_lse=False, out=out, output_scale=torch.tensor(0.1)
        )
