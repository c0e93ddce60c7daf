"""EAGER and TORCH_SDPA against the golden attention, where kernels go wrong first: empty, ragged and long rows."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend, flash_attention
from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.chunking import ContextChunk
from mla_conformance.reference.quantization import quantize_e4m3

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUE, SCALE = 3, 16, 8, 12, 0.31
CLOSE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

both = pytest.mark.parametrize("kernel", [EagerPrefillBackend, TorchSDPAPrefillBackend])


def operands(queries: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * queries + keys)

    def draw(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, HEADS, width, generator=generator).to(dtype)

    return draw(queries, NOPE + ROPE), draw(keys, NOPE + ROPE), draw(keys, VALUE)


def instance(kernel: type[MLAPrefillBackend], q: Sequence[int], kv: Sequence[int] | None = None) -> MLAPrefillBackend:
    """A backend with the metadata of requests of these lengths prepared, the context in one chunk."""
    backend = kernel(HEADS, SCALE, 32, NOPE, ROPE, VALUE, None)
    context = None
    if kv is not None:
        context = chunked_context_metadata(
            [ContextChunk((0,) * len(kv), tuple(kv))], torch.empty(sum(kv), 32 + ROPE), CPU
        )
    table = torch.zeros(len(q), 1, dtype=torch.int32)
    backend.prepare_metadata(
        prefill_metadata(q, block_table=table, dtype=torch.float32, device=CPU, chunked_context=context)
    )
    return backend


def golden(tensors: Sequence[torch.Tensor], q: Sequence[int], kv: Sequence[int], causal: bool) -> AttentionState:
    starts = [list(accumulate(lengths, initial=0)) for lengths in (q, kv)]
    return attention(*tensors, query_start_loc=starts[0], key_start_loc=starts[1], scale=SCALE, causal=causal)


def assert_matches(output: torch.Tensor, lse: torch.Tensor, want: AttentionState) -> None:
    assert lse.dtype == torch.float32
    tolerance = CLOSE[output.dtype]
    torch.testing.assert_close(output.double(), want.output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want.lse, atol=2e-4, rtol=1e-5)


@both
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 33), (0, 7, 0, 0, 4, 0), (0,), (129, 2)])
def test_new_tokens(kernel: type[MLAPrefillBackend], dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    tensors = operands(sum(lengths), sum(lengths), dtype)
    output, lse = instance(kernel, lengths).run_prefill_new_tokens(*tensors, return_softmax_lse=True)
    assert_matches(output, lse, golden(tensors, lengths, lengths, causal=True))


@both
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("q", "kv"),
    [((5, 1), (33, 200)), ((3, 4, 5), (0, 64, 0)), ((3, 4), (0, 0)), ((0, 2, 0), (5, 0, 0)), ((4,), (129,))],
)
def test_context_chunk(
    kernel: type[MLAPrefillBackend], dtype: torch.dtype, q: tuple[int, ...], kv: tuple[int, ...]
) -> None:
    tensors = operands(sum(q), sum(kv), dtype)
    output, lse = instance(kernel, q, kv).run_prefill_context_chunk(0, *tensors)
    assert_matches(output, lse, golden(tensors, q, kv, causal=False))


@both
def test_rows_without_keys_are_exactly_zero_and_minus_infinity(kernel: type[MLAPrefillBackend]) -> None:
    tensors = operands(7, 4, torch.bfloat16)
    output, lse = instance(kernel, (3, 4), (0, 4)).run_prefill_context_chunk(0, *tensors)
    assert not output[:3].any() and bool(output[3:].any())
    assert bool((lse[:, :3] == -torch.inf).all()) and bool(lse[:, 3:].isfinite().all())


@both
def test_out_receives_the_result(kernel: type[MLAPrefillBackend]) -> None:
    tensors = operands(9, 9, torch.float32)
    out = torch.full((9, HEADS, VALUE), torch.nan)
    returned = instance(kernel, (4, 5)).run_prefill_new_tokens(*tensors, return_softmax_lse=False, out=out)
    assert isinstance(returned, torch.Tensor) and returned.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), golden(tensors, (4, 5), (4, 5), causal=True).output, atol=2e-6, rtol=2e-6)


@both
def test_a_chunk_without_a_plan_is_refused(kernel: type[MLAPrefillBackend]) -> None:
    with pytest.raises(ValueError, match=r"context chunk 2 asked for.*no chunked context"):
        instance(kernel, (4,)).run_prefill_context_chunk(2, *operands(4, 9, torch.float32))


@pytest.mark.parametrize("scale", [0.013, 1.0])
def test_eager_writes_rounded_saturated_codes(scale: float) -> None:
    tensors = operands(9, 9, torch.float32)
    out = torch.zeros(9, HEADS, VALUE, dtype=torch.float8_e4m3fn)
    # Divided by 1e-4 the values are beyond 448, so both ends of the range occur.
    for factor in (scale, 1e-4):
        instance(EagerPrefillBackend, (9,)).run_prefill_new_tokens(
            *tensors, return_softmax_lse=False, out=out, output_scale=torch.tensor(factor)
        )
        want = quantize_e4m3(golden(tensors, (9,), (9,), causal=True).output, factor)
        torch.testing.assert_close(out.float(), want.float(), atol=2**-9, rtol=1 / 8)
    assert float(out.float().abs().max()) == 448.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(3, 40), (40, 3), (5, 5), (1, 17), (17, 1)])
def test_causal_flash_attention_is_aligned_bottom_right(queries: int, keys: int, dtype: torch.dtype) -> None:
    q, k, v = operands(queries, keys, dtype)
    output = torch.zeros(queries, HEADS, VALUE, dtype=dtype)
    lse = torch.full((HEADS, queries), -torch.inf)
    flash_attention(q, k, v, output, lse, SCALE, causal=True)
    assert_matches(output, lse, golden((q, k, v), (queries,), (keys,), causal=True))


def test_pytorch_needs_what_the_adapter_corrects() -> None:
    """The kernel's own causal mask is aligned top-left; if this changes, the adapter's mask can go."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in operands(3, 40, torch.float32))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, torch.nn.functional.pad(v, (0, NOPE + ROPE - VALUE)), 0.0, True, scale=SCALE
    )[0]
    torch.testing.assert_close(output[0, :, 0, :VALUE], v[0, :, 0])
