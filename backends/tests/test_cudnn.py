"""CUDNN: of the graph what needs no GPU, and the node for e4m3 operands against a stand-in of the graph."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.cudnn import CudnnFp8
from mla_conformance.backends.cudnn_graph import Key, layouts, lengths, offsets
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.metadata import prefill_metadata
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.reference.quantization import quantize_e4m3

_SCALE, _HEADS, _WIDTH = 0.3, 2, 32


@pytest.fixture
def backend(monkeypatch: Any, kernel: Any) -> Any:
    def execute(key: Any, tensors: Any, batch: Any) -> str:
        """Multiplies by every scale, P's and its inverse among them; no plan is for one token."""
        assert key.max_query_len == max(2, *batch.query_lens) and key.max_key_len == max(2, *batch.key_lens)
        assert all(tensors[f"descale_{name}"].tolist() == [1.0] for name in "qkv")
        assert all(batch.query_lens) and batch.query_start_loc.diff().tolist() == list(batch.query_lens)
        assert float(tensors["scale_s"] * tensors["descale_s"]) == 1.0 and key.causal
        start = batch.query_start_loc
        output, lse = kernel(tensors["q"], tensors["k"], tensors["v"], start, start, key.scale, True)
        tensors["o"].copy_(quantize_e4m3(output.double() * float(tensors["scale_o"]), 1.0))
        tensors["stats"].copy_(lse.mT)
        return "plan"

    monkeypatch.setattr("mla_conformance.backends.cudnn.execute", execute)
    made = CudnnFp8(_HEADS, _SCALE, 512, 16, 16, _WIDTH, None)
    table = torch.zeros(4, 1, dtype=torch.int32)
    made.prepare_metadata(
        prefill_metadata((0, 3, 0, 4), block_table=table, dtype=torch.float8_e4m3fn, device=torch.device("cpu"))
    )
    return made


def _operands() -> Any:
    """The last row does not count."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, _HEADS, _WIDTH, generator=generator).to(torch.float8_e4m3fn) for _ in range(3)]


def test_output_is_divided_by_the_scale(backend: Any, kernel: Any) -> None:
    q, k, v = _operands()
    out = torch.zeros(8, _HEADS, _WIDTH).to(torch.float8_e4m3fn)
    output, lse = backend.run_prefill_new_tokens(q, k, v, True, out=out, output_scale=torch.tensor(0.02))
    start = torch.tensor([0, 3, 7])
    want, want_lse = kernel(q[:7], k[:7], v[:7], start, start, _SCALE, True)
    assert output.data_ptr() == out.data_ptr() and output.dtype == torch.float8_e4m3fn
    assert torch.equal(output[:7].float(), quantize_e4m3(want.double() * float(1 / torch.tensor(0.02)), 1.0).float())
    torch.testing.assert_close(lse[:, :7], want_lse)
    table, cpu = torch.zeros(1, 1, dtype=torch.int32), torch.device("cpu")
    backend.prepare_metadata(prefill_metadata((1,), block_table=table, dtype=q.dtype, device=cpu))
    backend.run_prefill_new_tokens(q, k, v, False, out=out, output_scale=torch.tensor(0.02))
    assert backend.supports_quant_output(fp8_static_tensor_sym())
    assert not CudnnFp8.supports_unquantised_output(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedConfiguration, match="pass out in e4m3 and output_scale"):
        backend.run_prefill_new_tokens(*_operands(), False)
    with pytest.raises(UnsupportedConfiguration, match="context chunk is bfloat16"):
        backend.run_prefill_context_chunk(0, *_operands())


def test_layouts_carry_the_strides_of_a_view() -> None:
    strides = ((768, 192, 1), (768, 192, 1), (1024, 256, 1))
    key = Key(torch.device("cpu"), torch.bfloat16, 3, 4, 7, 9, (192, 128), strides, 0.1, True)
    found, start = layouts(key), torch.tensor([0, 3, 2**20], dtype=torch.int32)
    assert offsets(start, 2**12).shape == (3, 1, 1, 1)
    assert offsets(start, 2**12).flatten().tolist() == [0, 3 * 2**12, 2**32]  # elements, in 64 bits
    assert lengths(start).flatten().tolist() == [3, 2**20 - 3]
    assert found["q"] == ((3, 4, 7, 192), (768 * 7, 192, 768, 1))
    assert found["v"] == ((3, 4, 9, 128), (1024 * 9, 256, 1024, 1))
