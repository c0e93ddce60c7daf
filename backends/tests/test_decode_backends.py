"""Decode adapters against the definition, on pages filled by hand, and what they refuse before they launch anything."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, MLADecodeSelectorConfig
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.torch_sdpa_decode import TorchEfficientDecodeBackend, TorchSDPADecodeBackend
from mla_conformance.reference.attention import attention
from mla_conformance.reference.cache_layout import cache_dtype, decode_rows, encode, entry_width
from mla_conformance.reference.kv_cache import write_rows

BACKENDS = (EagerDecodeBackend, TorchSDPADecodeBackend)
PAGE, SCALE, K_SCALE = 4, 0.11, 0.013
QUERY_LENS, SEQ_LENS = (2, 1, 3), (9, 0, 5)
TABLE = torch.tensor([[5, 2, 7, 2**31 - 1], [-1, -1, -1, -1], [1, 4, -1, 99]], dtype=torch.int32)


def metadata(**changes: Any) -> MLACommonDecodeMetadata:
    return MLACommonDecodeMetadata(
        **{
            "block_table": TABLE,
            "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
            "query_start_loc": torch.tensor([0, 2, 3, 6], dtype=torch.int32),
            "max_query_len": 3,
            "max_seq_len": 9,
            "query_lens_cpu": torch.tensor(QUERY_LENS, dtype=torch.int32),
            "seq_lens_cpu": torch.tensor(SEQ_LENS, dtype=torch.int32),
            **changes,
        }
    )


def made(backend: type[MLADecodeBackend], layout: str = "auto", heads: int = 2) -> MLADecodeBackend:
    return backend(heads, SCALE, 512, 128, 64, 128, layout, None)


def operands(layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, the cache, its rows of both requests."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(6, 2, 576, generator=generator).bfloat16()
    latents = torch.randn(sum(SEQ_LENS), 576, generator=generator).bfloat16()
    rows = encode(latents[:, :512], latents[:, 512:], layout, K_SCALE)
    bits = torch.full((9, PAGE, entry_width(layout, 512, 64)), 0xFF, dtype=torch.uint8)
    cache = bits.repeat_interleave(2, dim=-1).view(torch.bfloat16) if layout == "auto" else bits
    cache = cache.view(cache_dtype(layout, torch.bfloat16))
    slots = [int(TABLE[b, j // PAGE]) * PAGE + j % PAGE for b, length in enumerate(SEQ_LENS) for j in range(length)]
    write_rows(cache, rows, torch.tensor(slots))
    keys = torch.cat(decode_rows(rows, layout, K_SCALE, 512, 64), dim=-1)
    return q, cache, keys, torch.tensor(K_SCALE)


@pytest.mark.parametrize("layout", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_compute_attention_over_pages(backend: type[MLADecodeBackend], layout: str) -> None:
    q, cache, keys, k_scale = operands(layout)
    instance = made(backend, layout)
    instance.prepare_metadata(metadata())
    output, lse = instance.run_decode(q[..., :512], q[..., 512:], cache, k_scale)
    k = keys.unsqueeze(1)
    starts: dict[str, Any] = {"query_start_loc": (0, 2, 3, 6), "key_start_loc": (0, 9, 9, 14)}
    golden = attention(q, k, k[..., :512], **starts, scale=SCALE, causal=True)
    assert (output.shape, output.dtype, lse.shape, lse.dtype) == ((6, 2, 512), q.dtype, (2, 6), torch.float32)
    assert torch.allclose(output.double(), golden.output, atol=0.03, rtol=0.03)
    assert torch.allclose(lse.double(), golden.lse, atol=0.03)
    assert bool((output[2] == 0).all()) and bool((lse[:, 2] == -torch.inf).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_masks_by_positions_in_the_whole_sequence(backend: type[MLADecodeBackend]) -> None:
    q, cache, keys, k_scale = operands("auto")
    total = torch.tensor([18, 1, 9], dtype=torch.int32)  # rank 1 of 2 holds the odd positions 1, 3, … 17 and 1, 3, 5, 7
    lengths = torch.tensor([9, 0, 4], dtype=torch.int32)
    instance = made(backend)
    ranks = {"dcp_world_size": 2, "dcp_rank": 1, "dcp_tot_seq_lens": total}
    instance.prepare_metadata(metadata(seq_lens=lengths, seq_lens_cpu=lengths, **ranks))
    _, lse = instance.run_decode(q[..., :512], q[..., 512:], cache, k_scale)
    visible = [8, 9, 0, 3, 4, 4]  # keys before positions 17, 18, 1, 7, 8, 9
    first = [0, 0, 9, 9, 9, 9]
    for token, (start, count) in enumerate(zip(first, visible, strict=True)):
        scores = SCALE * q[token].double() @ keys[start : start + count].mT
        assert torch.allclose(lse[:, token].double(), scores.logsumexp(-1), atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda o: o.update(ql_nope=o["ql_nope"].double(), q_pe=o["q_pe"].double()),
            "dtype torch.float64 not supported",
        ),
        (lambda o: o.update(ql_nope=o["ql_nope"][:4]), r"ql_nope: expected at least 6 tokens of \[2, 512\]"),
        (lambda o: o.update(q_pe=o["q_pe"][..., :32]), r"q_pe: .* \[2, 64\] by the metadata, got shape \[6, 2, 32\]"),
        (lambda o: o.update(kv_cache=o["kv_cache"][..., :500]), r"kv_cache: expected \[blocks, page, 576\] of"),
        (lambda o: o.update(kv_cache=o["kv_cache"].float()), "for auto, got .* of torch.float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    backend: type[MLADecodeBackend], change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    q, cache, _, k_scale = operands("auto")
    given = {"ql_nope": q[..., :512], "q_pe": q[..., 512:], "kv_cache": cache, "k_scale": k_scale}
    change(given)
    instance = made(backend)
    instance.prepare_metadata(metadata())
    with pytest.raises(ValueError, match=said):
        instance.run_decode(**given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_table_that_is_too_short_is_refused(backend: type[MLADecodeBackend]) -> None:
    q, cache, _, k_scale = operands("auto")
    instance = made(backend)
    instance.prepare_metadata(metadata(block_table=TABLE[:, :2]))
    with pytest.raises(ValueError, match="a sequence of 9 tokens has 3 pages of 4, its row holds 2"):
        instance.run_decode(q[..., :512], q[..., 512:], cache, k_scale)


class Narrow(EagerDecodeBackend):
    """Declares one token, one page size, one layout, one pair of dims."""

    supported_query_len = 1
    supports_nonuniform_queries = False
    supports_causal_dcp = False
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [64]


CONFIG = MLADecodeSelectorConfig(torch.bfloat16, "auto", 64, 512, 64)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"block_size": 16}, ["block_size 16 not supported"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype fp8 not supported"]),
        ({"kv_cache_dtype": "fp8_e4m3"}, ["kv_cache_dtype fp8_e4m3 not supported"]),
        ({"kv_cache_dtype": "bfloat16"}, []),
        ({"kv_cache_dtype": "fp8_ds_mla", "tile_scales": "pow2"}, ["kv_cache_dtype fp8_ds_mla not supported"]),
        (
            {"kv_cache_dtype": "bfloat16", "dtype": torch.float16},
            ["kv_cache_dtype bfloat16 expects a model of bfloat16, got torch.float16; use auto"],
        ),
        ({"kv_lora_rank": 256}, ["latent dims (L, R) = (256, 64) not supported (supported: [(512, 64)])"]),
        ({"max_query_len": 2}, ["2 query tokens a request not supported"]),
        ({"uniform": False}, ["requests with different numbers of query tokens not supported"]),
        ({"dtype": torch.float64}, ["dtype torch.float64 not supported"]),
    ],
)
def test_a_configuration_is_refused_with_every_reason(change: dict[str, Any], reasons: list[str]) -> None:
    assert Narrow.validate_configuration(None, CONFIG._replace(**change)) == reasons


class ReadsPowersOfTwo(EagerDecodeBackend):
    supported_tile_scales: ClassVar[list[str]] = ["pow2"]


def test_scales_that_a_kernel_does_not_read_are_named_beside_those_that_it_does() -> None:
    mixed = CONFIG._replace(kv_cache_dtype="fp8_ds_mla")
    assert ReadsPowersOfTwo.validate_configuration(None, mixed._replace(tile_scales="pow2")) == []
    reasons = ReadsPowersOfTwo.validate_configuration(None, mixed)
    assert reasons == ["fp8_ds_mla with float32 scales not supported (supported: pow2)"]


def test_what_is_declared_unsupported_is_refused_by_the_call_too() -> None:
    q, cache, _, k_scale = operands("auto")
    instance = made(Narrow)
    instance.prepare_metadata(metadata())
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: block_size 4 not supported; 3 query tokens a request"):
        instance.run_decode(q[..., :512], q[..., 512:], cache, k_scale)


def test_another_kernel_serves_a_gpu() -> None:
    assert TorchSDPADecodeBackend.resolve(None) is TorchSDPADecodeBackend
    assert TorchSDPADecodeBackend.resolve(DeviceCapability(9, 0)) is TorchEfficientDecodeBackend
    assert replace(TorchEfficientDecodeBackend.declaration, deviations=()) != TorchSDPADecodeBackend.declaration
