"""What EAGER and TORCH_SDPA refuse and rely on; the suite compares them with the golden attention."""

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.metadata import prefill_metadata
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend

HEADS, NOPE, ROPE, VALUE, SCALE = 3, 16, 8, 12, 0.31

both = pytest.mark.parametrize("kernel", [EagerPrefillBackend, TorchSDPAPrefillBackend])


def operands(queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * queries + keys)
    shapes = (queries, NOPE + ROPE), (keys, NOPE + ROPE), (keys, VALUE)
    return [torch.randn(tokens, HEADS, width, generator=generator) for tokens, width in shapes]


@both
def test_a_chunk_without_a_plan_is_refused(kernel: type[MLAPrefillBackend]) -> None:
    with pytest.raises(ValueError, match=r"context chunk 2 asked for.*no chunked context"):
        backend = kernel(HEADS, SCALE, 32, NOPE, ROPE, VALUE, None)
        table = torch.zeros(1, 1, dtype=torch.int32)
        plan = prefill_metadata((4,), block_table=table, dtype=torch.float32, device=torch.device("cpu"))
        backend.prepare_metadata(plan)
        backend.run_prefill_context_chunk(2, *operands(4, 9))


def test_pytorch_needs_what_the_adapter_corrects() -> None:
    """The kernel's own causal mask is aligned top-left; if this changes, the adapter's mask can go."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in operands(3, 40))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, torch.nn.functional.pad(v, (0, NOPE + ROPE - VALUE)), 0.0, True, scale=SCALE
    )[0]
    torch.testing.assert_close(output[0, :, 0, :VALUE], v[0, :, 0])
