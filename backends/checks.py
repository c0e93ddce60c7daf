"""What a backend of ours checks before it launches: the refusals of SPEC 3.8, with expected and got."""

import torch

from mla_conformance.backends.interface import PrefillKernelBackend, UnsupportedConfiguration
from mla_conformance.reference.dimensions import MLADimensions


def check_operands(
    backend: PrefillKernelBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_tokens: int, key_tokens: int
) -> None:
    """Refuse operands that the backend does not declare or that contradict the metadata.

    Args:
        backend: the instance that is called.
        q: [T, N, P + R].
        k: [S, N, P + R].
        v: [S, N, V].
        query_tokens: rows of q that the metadata counts.
        key_tokens: rows of k and v that the metadata counts.

    Raises:
        UnsupportedConfiguration: a dtype or head dims outside the declaration.
        ValueError: shapes or lengths that do not fit the metadata.
    """
    _check_declared(backend, q, k, v)
    head_dim = backend.qk_nope_head_dim + backend.qk_rope_head_dim
    for name, tensor, tokens, width in (
        ("q", q, query_tokens, head_dim),
        ("k", k, key_tokens, head_dim),
        ("v", v, key_tokens, backend.v_head_dim),
    ):
        if tensor.shape[1:] != (backend.num_heads, width) or tensor.shape[0] < tokens:
            raise ValueError(
                f"{name}: expected at least {tokens} tokens of [{backend.num_heads}, {width}] by the metadata, "
                f"got shape {list(tensor.shape)}"
            )


def _check_declared(backend: PrefillKernelBackend, *operands: torch.Tensor) -> None:
    for dtype in {operand.dtype for operand in operands}:
        if not backend.supports_dtype(dtype):
            supported = ", ".join(map(str, backend.supported_dtypes))
            raise UnsupportedConfiguration(
                f"{backend.get_name()}: dtype {dtype} not supported (supported: {supported})"
            )
    dimensions = MLADimensions(
        qk_nope_head_dim=backend.qk_nope_head_dim,
        qk_rope_head_dim=backend.qk_rope_head_dim,
        v_head_dim=backend.v_head_dim,
    )
    if not backend.supports_mla_dimensions(dimensions):
        raise UnsupportedConfiguration(f"{backend.get_name()}: MLA dimensions {dimensions} not supported")


def check_unquantised(backend: PrefillKernelBackend, output_scale: torch.Tensor | None) -> None:
    """Refuse a quantised output in a backend that has none.

    Raises:
        UnsupportedConfiguration: an output scale was given.
    """
    if output_scale is not None:
        raise UnsupportedConfiguration(
            f"{backend.get_name()}: quantised output not supported; quantise the result of a call without output_scale"
        )
