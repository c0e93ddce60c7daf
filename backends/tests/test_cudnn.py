"""FlashInfer's entry against a stand-in; of the graph what needs no GPU. The plan itself is judged on a GPU."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.cudnn import CudnnPrefillBackend
from mla_conformance.backends.cudnn_graph import Key, layouts, lengths, offsets
from mla_conformance.reference.dimensions import MLADimensions

_FUNCTION = "flashinfer/cudnn/prefill.py:cudnn_batch_prefill_with_kv_cache"
_VERSIONS = ["flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"]


def _library(kernel: Any, version: Any) -> Any:
    """LSE padded to [B, longest, N], garbage where no key is visible; natural before 0.7, then base 2 unless asked."""

    def call(a: Any) -> Any:
        queries, keys = (a[f"actual_seq_lens_{name}"].flatten().cumsum(0) for name in ("q", "kv"))
        queries, keys = (torch.cat([torch.zeros(1, dtype=x.dtype), x]) for x in (queries, keys))
        for name, operand, start in (("q", a["q"], queries), ("k", a["k_cache"], keys), ("v", a["v_cache"], keys)):
            assert a[f"batch_offsets_{name}"].flatten().tolist() == (start * operand.stride(0)).tolist()
        output, lse = kernel(a["q"], a["k_cache"], a["v_cache"], queries, keys, a["scale"], a["causal"])
        empty = lse[0] == -math.inf
        output[empty], lse[:, empty] = math.nan, -2e34
        a["out"].copy_(output)
        lse = lse if version.endswith("0.6.13") or a["lse_base"] == "ln" else lse / math.log(2)
        return a["out"], _padded(lse, queries)

    return call


def _padded(lse: Any, start: Any) -> Any:
    padded = torch.full((len(start) - 1, int(start.diff().max()), lse.shape[0]), math.nan)
    for request, (first, last) in enumerate(zip(start[:-1].tolist(), start[1:].tolist(), strict=True)):
        padded[request, : last - first] = lse[:, first:last].mT
    return padded


@pytest.mark.parametrize("version", _VERSIONS)
def test_conventions_of_the_entry(version: Any, recorded: Any, installed: Any, kernel: Any, conforms: Any) -> None:
    entry = recorded(version, _FUNCTION, _library(kernel, version))
    installed("flashinfer", cudnn=installed("flashinfer.cudnn", cudnn_batch_prefill_with_kv_cache=entry))
    conforms(CudnnPrefillBackend.variants["flashinfer"])


def test_offsets_are_elements_in_64_bits() -> None:
    found = offsets(torch.tensor([0, 3, 2**20], dtype=torch.int32), 2**12)
    assert found.shape == (3, 1, 1, 1)
    assert found.flatten().tolist() == [0, 3 * 2**12, 2**32]
    assert lengths(torch.tensor([0, 3, 8], dtype=torch.int32)).flatten().tolist() == [3, 5]


def test_layouts_carry_the_strides_of_a_view() -> None:
    strides = ((768, 192, 1), (768, 192, 1), (1024, 256, 1))
    key = Key(torch.device("cpu"), torch.bfloat16, 3, 4, 7, 9, (192, 128), strides, 0.1, True)
    found = layouts(key)
    assert found["q"] == ((3, 4, 7, 192), (768 * 7, 192, 768, 1))
    assert found["v"] == ((3, 4, 9, 128), (1024 * 9, 256, 1024, 1))


@pytest.mark.parametrize(("dims", "supported"), [((128, 64, 128), True), ((24, 8, 20), False), ((256, 64, 320), False)])
def test_head_dims(dims: Any, supported: Any) -> None:
    nope, rope, value = dims
    dimensions = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    assert CudnnPrefillBackend.supports_mla_dimensions(dimensions) == supported
