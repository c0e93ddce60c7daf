"""The adapters of SGLang's cache kernels against stand-ins that follow their source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.sglang_triton_cache import SGLangTritonCacheBackend
from mla_conformance.reference.cache_layout import cache_dtype, decode_rows, encode, entry_width

_LABEL, _FOLDER = "sglang 0.5.23", "sglang/kernels/ops"
LATENT, ROPE, PAGE, ONE = 512, 64, 16, torch.tensor(1.0)


class _Writer:
    """The kernel that writes rows: a program a row, -1 as its reserved index."""

    def __init__(self, recorded: Any) -> None:
        self._call = recorded(_LABEL, f"{_FOLDER}/kvcache/mla_buffer.py:set_mla_kv_buffer_kernel", self._write)

    def __getitem__(self, grid: Any) -> Any:
        self._grid = grid
        return self._call

    def _write(self, a: Any) -> None:
        rows, loc, parts = a["kv_buffer_ptr"], a["loc_ptr"], (a["cache_k_nope_ptr"], a["cache_k_rope_ptr"])
        assert self._grid == (len(loc), 1) and a["BLOCK"] == 1024 and a["reserved_skip_index"] == -1
        assert (a["DCP_RANK"], a["DCP_WORLD_SIZE"], a["buffer_stride"]) == (0, 1, rows.stride(0))
        assert (a["nope_dim"], a["rope_dim"]) == tuple(part.shape[1] for part in parts)
        assert (a["nope_stride"], a["rope_stride"]) == tuple(part.stride(0) for part in parts)
        rows[loc[loc >= 0]] = torch.cat(parts, dim=1)[loc >= 0]


@pytest.fixture(autouse=True)
def library(recorded: Any, installed: Any, monkeypatch: Any) -> None:
    """Writing in two steps, gathering of listed rows."""
    monkeypatch.setattr(SGLangTritonCacheBackend, "supports_compute_capability", lambda *_: True)

    def quantised(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        backend = EagerCacheBackend(LATENT, ROPE, "fp8_ds_mla", "float32", None)
        parts = backend._latent_entries(a["k_nope"], a["k_rope"], ONE).split([528, 128], dim=1)
        return parts[0].unsqueeze(1), parts[1].unsqueeze(1)

    def values(a: Any) -> torch.Tensor:
        rows = a["quant_k_cache"]
        assert rows.dtype == torch.float8_e4m3fn
        entries = rows.view(torch.uint8)[a["page_table_1_flattened"]]
        return torch.cat(decode_rows(entries, "fp8_ds_mla", 1.0, LATENT, ROPE, torch.bfloat16), dim=-1)[:, None]

    def gathered(a: Any) -> None:
        latent, rope = a["kv_buffer"][a["loc"]].split([LATENT, ROPE], dim=1)
        a["cache_k_nope"].copy_(latent)
        a["cache_k_rope"].copy_(rope)

    def stand_in(module: str, name: str, call: Any, **others: Any) -> None:
        function = recorded(_LABEL, f"{_FOLDER}/{module}.py:{name}", call)
        installed(f"{_FOLDER}/{module}".replace("/", "."), **{name: function}, **others)

    writer = _Writer(recorded)
    stand_in("kvcache/mla_buffer", "get_mla_kv_buffer_triton", gathered, set_mla_kv_buffer_kernel=writer)
    stand_in("quantization/dsa_quant_k_cache", "quantize_k_cache_separate", quantised)
    stand_in("attention/dsa/dequant_k_cache", "dequantize_k_cache_paged_dsa", values)


def _cache(layout: str, beyond: int = 0) -> torch.Tensor:
    """Blocks of one of two layers, with so many elements beyond these."""
    width = entry_width(layout, LATENT, ROPE)
    both = torch.randint(0, 100, (6, 2 * PAGE * width + beyond), generator=torch.Generator().manual_seed(1))
    return both.to(cache_dtype(layout, torch.bfloat16))[:, PAGE * width : 2 * PAGE * width].unflatten(1, (PAGE, width))


@pytest.mark.parametrize("layout", ["auto", "fp8_ds_mla"])
def test_writes_and_gathers_as_eager_does(layout: str) -> None:
    kernels = [
        kernel(LATENT, ROPE, layout, "float32", None) for kernel in (SGLangTritonCacheBackend, EagerCacheBackend)
    ]
    wide = torch.randn(9, LATENT + ROPE + 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    written = [_cache(layout) for _ in kernels]
    for kernel, cache in zip(kernels, written, strict=True):
        parts = wide[:, :LATENT], wide[:, LATENT : LATENT + ROPE]
        kernel.run_write_latent(*parts, cache, torch.tensor([95, -1, 16, 0, 47]), ONE)
    assert torch.equal(*written) and not torch.equal(written[0], _cache(layout))
    cache, expected = _cache(layout), torch.zeros(40, LATENT + ROPE, dtype=torch.bfloat16)
    if layout == "fp8_ds_mla":
        keys = torch.randn(6 * PAGE, LATENT + ROPE, generator=torch.Generator().manual_seed(2)).bfloat16()
        rows = encode(keys[:, :LATENT], keys[:, LATENT:], layout, 1.0)
        cache.copy_(rows.view(cache.shape))
    found, table = expected.clone(), torch.tensor([[3, 1, -9], [5, -9, -9], [0, 2, 4]], dtype=torch.int32)
    starts, cu_seq_lens = (torch.tensor(x, dtype=torch.int32) for x in ((7, 0, 20), (0, 20, 20, 37)))
    for kernel, workspace in zip(kernels, (found, expected), strict=True):
        kernel.run_gather_latent(cache, workspace, table, cu_seq_lens, starts, ONE)
    assert torch.equal(found, expected) and bool(found[:37].any()) and not found[37:].any()


def test_what_is_not_declared_is_refused_before_it_is_written() -> None:
    cache = torch.zeros(2, PAGE, LATENT + ROPE, dtype=torch.float32)
    backend = SGLangTritonCacheBackend(LATENT, ROPE, "auto", "float32", None)
    latents = torch.ones(1, LATENT), torch.ones(1, ROPE)
    with pytest.raises(UnsupportedConfiguration, match="dtype"):
        backend.run_write_latent(*latents, cache, torch.tensor([0]), ONE)
    assert not cache.any()
    with pytest.raises(UnsupportedConfiguration, match="21056 elements apart, no whole number of entries of 656, not"):
        backend = SGLangTritonCacheBackend(LATENT, ROPE, "fp8_ds_mla", "float32", None)
        latents = torch.ones(1, LATENT).bfloat16(), torch.ones(1, ROPE).bfloat16()
        backend.run_write_latent(*latents, _cache("fp8_ds_mla", beyond=64), torch.tensor([0]), ONE)
