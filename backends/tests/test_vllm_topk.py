"""The kernels of vLLM's top-k against stand-ins behind the schemas of its compiled library."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.topk import TopKMetadata
from mla_conformance.backends.vllm_topk import VllmTopKBackend

_VARIANTS: Any = VllmTopKBackend.variants
_WORKSPACE = "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()"
_SCHEMAS = {
    "top_k_per_row_prefill": "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, "
    "int stride0, int stride1, int topK) -> ()",
    "top_k_per_row_decode": "(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, "
    "int stride1, int topK) -> ()",
    "persistent_topk": _WORKSPACE,
    "cooperative_topk": _WORKSPACE,
}
"""As the wheel of vLLM 0.33.0 registers them."""


def _fill(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, output: torch.Tensor) -> None:
    """As many columns as a row has, which count from its start; what is behind them stays."""
    assert starts.dtype == lengths.dtype == torch.int32 and starts.is_contiguous() and lengths.is_contiguous()
    assert bool((output == -1).all())
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        found = logits[row, start : start + length].topk(min(length, output.shape[1])).indices
        output[row, : len(found)] = found.int()


def _prefill(logits: Any, starts: Any, ends: Any, output: Any, rows: int, stride0: int, stride1: int, k: int) -> None:
    assert (rows, stride0, stride1, k) == (len(logits), logits.stride(0), 1, output.shape[1])
    _fill(logits, starts, ends - starts, output)


def _decode(logits: Any, next_n: int, lengths: Any, output: Any, rows: int, stride0: int, stride1: int, k: int) -> None:
    assert next_n == 1
    _prefill(logits, torch.zeros_like(lengths), lengths, output, rows, stride0, stride1, k)


def _persistent(logits: Any, lengths: Any, output: Any, workspace: Any, k: int, max_seq_len: int) -> None:
    assert workspace.shape == (1 << 20,) and workspace.dtype == torch.uint8 and output.shape == (len(logits), k)
    assert int(lengths.max()) <= max_seq_len <= logits.shape[1]
    _fill(logits, torch.zeros_like(lengths), lengths, output)


def _cooperative(logits: Any, lengths: Any, output: Any, workspace: Any, k: int, max_seq_len: int) -> None:
    assert len(logits) <= 64 and logits.stride(0) % 4 == 0 and logits.data_ptr() % 16 == 0
    _persistent(logits, lengths, output, workspace, k, max_seq_len)


@pytest.fixture
def library(installed: Any, monkeypatch: Any) -> Iterator[None]:
    installed("vllm._C_stable_libtorch")
    monkeypatch.setattr(VllmTopKBackend, "supports_compute_capability", lambda *_: True)
    registered = torch.library.Library("_C", "FRAGMENT")
    for (name, schema), kernel in zip(_SCHEMAS.items(), (_prefill, _decode, _persistent, _cooperative), strict=True):
        registered.define(name + schema)
        registered.impl(name, kernel, "CPU")
    yield
    registered._destroy()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("variant", _VARIANTS)
def test_conventions(variant: str, monkeypatch: Any) -> None:
    """130 rows of an odd number of columns, of which some see fewer than are selected, and some none."""
    monkeypatch.setattr(_VARIANTS["cooperative"], "supports_compute_capability", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(130, 700, generator=generator)[:, :667]
    lengths = torch.randint(0, 640, (130, 2), generator=generator).int()[:, 0]
    starts = torch.arange(130, dtype=torch.int32) % 27 if variant == "prefill" else None
    found, expected = (_selected(kernel, logits, lengths, starts) for kernel in (_VARIANTS[variant], EagerTopKBackend))
    assert torch.equal(found, expected)


def _selected(kernel: Any, logits: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    backend = kernel(vllm_config=None)
    backend.prepare_metadata(TopKMetadata(lengths, starts, 640))
    found: torch.Tensor = backend.run_top_k_per_row(logits, 512)
    return found
