"""What an indexer of ours checks before it launches: the refusals of SPEC 3.8 and 8.6, with expected and got."""

import torch

from mla_conformance.backends.indexer import MLAIndexerBackend, MLAIndexerSelectorConfig
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.platform import get_device_capability
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.reference.cache_layout import entry_width


def check_index_call(
    backend: MLAIndexerBackend,
    metadata: MLASparseMetadata,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    call: str,
    topk_tokens: int = 1,
) -> None:
    """Refuse operands that do not fit, and what is not declared; reads no device memory.

    Args:
        backend: which is called.
        metadata: of the batch.
        operands: q, weights, k and k_scale.
        call: ``logits`` or ``topk``.
        topk_tokens: tokens that are selected for a query token.

    Raises:
        ValueError: another shape or dtype than expected.
        UnsupportedConfiguration: the backend does not declare it.
    """
    q, weights, k, k_scale = operands
    tokens, codes = int(metadata.query_lens_cpu.sum()), backend.kv_cache_dtype != "auto"
    heads, paged = backend.num_heads, metadata.block_table is not None
    _expect("q", q, (tokens, heads, backend.head_dim), torch.float8_e4m3fn if codes else q.dtype)
    _expect("weights", weights, (tokens, heads), torch.float32)
    if paged:
        shape = (*k.shape[:2], entry_width(backend.kv_cache_dtype, backend.head_dim, 0))
        _expect("k", k, shape, torch.uint8 if codes else q.dtype)
    else:
        _expect("k", k, (*k.shape[:1], backend.head_dim), q.dtype)
    if (k_scale is not None) != (codes and not paged):
        want = "the scales of gathered codes" if k_scale is None else "None, since no gathered codes were given"
        raise ValueError(f"k_scale: expected {want}, got {None if k_scale is None else list(k_scale.shape)}")
    if k_scale is not None:
        _expect("k_scale", k_scale, tuple(k.shape[:1]), torch.float32)
    if topk_tokens < 1:
        raise ValueError(f"topk_tokens: expected a positive number, got {topk_tokens}")
    config = MLAIndexerSelectorConfig(
        call=call,
        paged=paged,
        dtype=torch.bfloat16 if codes else q.dtype,
        kv_cache_dtype=backend.kv_cache_dtype,
        block_size=k.shape[1] if paged else 1,
        num_heads=heads,
        head_dim=backend.head_dim,
        topk_tokens=topk_tokens,
        index_space=metadata.index_space,
    )
    reasons = backend.validate_configuration(get_device_capability(q.device), config)
    if reasons:
        raise UnsupportedConfiguration(f"{backend.get_name()}: {'; '.join(reasons)}")


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name}: expected {list(shape)} of {dtype}, got {list(x.shape)} of {x.dtype}")
