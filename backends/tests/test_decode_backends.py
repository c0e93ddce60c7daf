"""What decode backends refuse before they launch anything; the suite compares their results with the golden ones."""

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

BACKENDS = (EagerDecodeBackend, TorchSDPADecodeBackend)
PAGE = 4
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


def made(backend: type[MLADecodeBackend]) -> MLADecodeBackend:
    return backend(2, 0.11, 512, 128, 64, 128, "auto", None)


def operands() -> dict[str, torch.Tensor]:
    """What a call takes over a cache of the model's dtype."""
    q, cache = torch.zeros(6, 2, 576).bfloat16(), torch.zeros(9, PAGE, 576).bfloat16()
    return {"ql_nope": q[..., :512], "q_pe": q[..., 512:], "kv_cache": cache, "k_scale": torch.tensor(1.0)}


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
    given = operands()
    change(given)
    instance = made(backend)
    instance.prepare_metadata(metadata())
    with pytest.raises(ValueError, match=said):
        instance.run_decode(**given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_table_that_is_too_short_is_refused(backend: type[MLADecodeBackend]) -> None:
    instance = made(backend)
    instance.prepare_metadata(metadata(block_table=TABLE[:, :2]))
    with pytest.raises(ValueError, match="a sequence of 9 tokens has 3 pages of 4, its row holds 2"):
        instance.run_decode(**operands())


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
    instance = made(Narrow)
    instance.prepare_metadata(metadata())
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: block_size 4 not supported; 3 query tokens a request"):
        instance.run_decode(**operands())


def test_another_kernel_serves_a_gpu() -> None:
    assert TorchSDPADecodeBackend.resolve(None) is TorchSDPADecodeBackend
    assert TorchSDPADecodeBackend.resolve(DeviceCapability(9, 0)) is TorchEfficientDecodeBackend
    assert replace(TorchEfficientDecodeBackend.declaration, deviations=()) != TorchSDPADecodeBackend.declaration
