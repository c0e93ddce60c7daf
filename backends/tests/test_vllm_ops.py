"""vLLM's cache and top-k kernels against stand-ins behind the schemas of its compiled library, as its sources say."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.topk import TopKMetadata
from mla_conformance.backends.vllm_cache import VllmCacheBackend
from mla_conformance.backends.vllm_topk import VllmTopKBackend
from mla_conformance.reference.cache_layout import cache_dtype, entry_width

BF16, INT, ONE = torch.bfloat16, torch.int32, torch.tensor(1.0)
_SCHEMAS = {
    "concat_and_cache_mla": "(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor scale, bool skip_scale=False) -> ()",
    "indexer_k_quant_and_cache": "(Tensor k, Tensor! kv_cache, Tensor slot_mapping, int quant_block_size, "
    "str kv_cache_dtype) -> ()",
    "gather_and_maybe_dequant_cache": "(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
    "Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts) -> ()",
    "cp_gather_cache": "(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, int batch_size, "
    "Tensor? seq_starts) -> ()",
    "cp_gather_and_upconvert_fp8_kv_cache": "(Tensor src_cache, Tensor! dst, Tensor block_table, "
    "Tensor workspace_starts, int batch_size, Tensor? seq_starts, Tensor? host_cache=None, "
    "Tensor? host_row_ids=None, Tensor? device_row_ids=None) -> ()",
    "cp_gather_indexer_k_quant_cache": "(Tensor kv_cache, Tensor! dst_k, Tensor! dst_scale, Tensor block_table, "
    "Tensor cu_seq_lens) -> ()",
}
_WORKSPACE = "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()"
_TOPK_SCHEMAS = {
    "top_k_per_row_prefill": "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, "
    "int stride0, int stride1, int topK) -> ()",
    "top_k_per_row_decode": "(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, "
    "int stride1, int topK) -> ()",
    "persistent_topk": _WORKSPACE,
    "cooperative_topk": _WORKSPACE,
}
"""As the wheel of vLLM 0.33.0 registers them."""
_VARIANTS: Any = VllmTopKBackend.variants


def _eager(latent: int, rope: int, layout: str, scales: str = "pow2") -> EagerCacheBackend:
    return EagerCacheBackend(latent, rope, layout, scales, None)


def _write(kv_c: Any, k_pe: Any, cache: Any, slots: Any, layout: str, scale: Any, skip_scale: bool = False) -> None:
    assert slots.dtype == torch.int64 and not skip_scale
    assert len(slots), "a launch of no blocks is an error"
    assert layout != "fp8_ds_mla" or all(
        x.data_ptr() % 16 == x.stride(0) * 2 % 16 == 0 for x in (kv_c, k_pe) if x.numel()
    )
    _eager(kv_c.shape[1], k_pe.shape[1], layout).run_write_latent(kv_c, k_pe, cache, slots, scale)


def _write_index(k: Any, cache: Any, slots: Any, block: int, scale_format: str) -> None:
    assert len(k) == len(slots) and block == 128 and k.is_contiguous() and k.data_ptr() % 8 == 0
    scales = "pow2" if scale_format == "ue8m0" else "float32"
    _eager(128, 0, "fp8_index", scales).run_write_index(k, cache, slots)


def _dequant(
    cache: Any, dst: Any, table: Any, starts: Any, token_to_seq: Any, rows: int, layout: str, scale: Any, first: Any
) -> None:
    assert dst.shape[1] in (320, 512, 576) and rows == int(starts[-1])
    assert token_to_seq.tolist() == [r for r, n in enumerate(starts.diff().tolist()) for _ in range(n)]
    _eager(dst.shape[1], 0, layout).run_gather_latent(cache, dst, table, starts, first, scale)


def _copy(cache: Any, dst: Any, table: Any, starts: Any, requests: int, first: Any) -> None:
    assert cache.dtype == dst.dtype and requests == len(starts) - 1
    _eager(cache.shape[2], 0, "auto").run_gather_latent(cache, dst, table, starts, first, ONE)


def _upconvert(cache: Any, dst: Any, table: Any, starts: Any, requests: int, first: Any, *_: Any) -> None:
    """The last request's rows end where the workspace does."""
    assert (len(starts), dst.dtype) == (requests, BF16)
    ends = torch.cat((starts, torch.tensor([len(dst)], dtype=INT)))
    _eager(512, 64, "fp8_ds_mla").run_gather_latent(cache, dst, table, ends, first, ONE)


def _gather_index(cache: Any, k: Any, scales: Any, table: Any, starts: Any) -> None:
    """From the first token of a request on."""
    assert cache.shape[1] == 64 and scales.shape == (len(k), 4) and scales.dtype == torch.uint8
    first = torch.zeros(len(table), dtype=INT)
    _eager(128, 0, "fp8_index").run_gather_index(cache, k, scales.view(torch.float32)[:, 0], table, starts, first)


def _fill(logits: Tensor, starts: Tensor, lengths: Tensor, output: Tensor) -> None:
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


@pytest.fixture(autouse=True)
def library(installed: Any, monkeypatch: Any) -> Iterator[None]:
    installed("vllm._C_stable_libtorch")
    for adapter in (VllmCacheBackend, VllmTopKBackend, _VARIANTS["cooperative"]):
        monkeypatch.setattr(adapter, "supports_compute_capability", lambda *_: True)
    both: list[Any] = [("_C_cache_ops", _SCHEMAS, (_write, _write_index, _dequant, _copy, _upconvert, _gather_index))]
    both += [("_C", _TOPK_SCHEMAS, (_prefill, _decode, _persistent, _cooperative))]
    registered = []
    for namespace, schemas, kernels in both:
        registered.append(torch.library.Library(namespace, "FRAGMENT"))
        for (name, schema), kernel in zip(schemas.items(), kernels, strict=True):
            registered[-1].define(name + schema)
            registered[-1].impl(name, kernel, "CPU")
    yield
    for each in registered:
        each._destroy()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def _both(layout: str, latent: int, rope: int, scales: str, call: str, given: dict[str, Any], names: list[str]) -> None:
    """The adapter writes what EAGER does, and nothing else, into copies of what is named."""
    found = []
    for kernel in (VllmCacheBackend, EagerCacheBackend):
        copies = {name: given[name].clone() for name in names}
        getattr(kernel(latent, rope, layout, scales, None), call)(**{**given, **copies})
        found.append([copies[name].view(torch.uint8) for name in names])
    assert all(map(torch.equal, *found)) and not torch.equal(found[0][0], given[names[0]].view(torch.uint8))


@pytest.mark.parametrize(
    ("layout", "latent", "rope"), [("auto", 8, 4), ("fp8", 512, 64), ("fp8_ds_mla", 512, 64), ("fp8_ds_mla", 512, 0)]
)
def test_latents_are_written(layout: str, latent: int, rope: int) -> None:
    rows = _random(5, latent + rope + 1)[:, 1:]
    given = {
        "kv_c": rows[:, :latent],
        "k_pe": rows[:, latent:],
        "kv_cache": torch.zeros(3, 16, entry_width(layout, latent, rope)).to(cache_dtype(layout, BF16)),
        "slot_mapping": torch.tensor([3, -1, 40]),
        "k_scale": torch.tensor(0.25),
    }
    _both(layout, latent, rope, "pow2", "run_write_latent", given, ["kv_cache"])
    nowhere = given | {"slot_mapping": given["slot_mapping"][:0]}
    VllmCacheBackend(latent, rope, layout, "pow2", None).run_write_latent(**nowhere)  # is no launch


@pytest.mark.parametrize("scales", ["pow2", "float32"])
def test_index_keys_are_written(scales: str) -> None:
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    given = {"k": _random(6, 129)[:, 1:], "kv_cache": cache, "slot_mapping": torch.tensor([3, -1, 100])}
    _both("fp8_index", 128, 0, scales, "run_write_index", given, ["kv_cache"])


def _gather(cache: Tensor, ratio: int = 1) -> dict[str, Any]:
    """Three requests, of which one has no entry; starts inside of pages; no block where nothing is gathered."""
    return {
        "kv_cache": cache,
        "block_table": torch.tensor([[-7, 2, 0], [9, 9, 9], [1, -7, -7]], dtype=INT),
        "cu_seq_lens": torch.tensor([0, 70, 70, 75], dtype=INT),
        "seq_starts": torch.tensor([65 * ratio, 500, 3 * ratio + ratio - 1], dtype=INT),
        "compress_ratio": ratio,
    }


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "dequantise"),
    [("auto", 8, 4, False), *((layout, 512, 64, x) for layout in ("fp8", "fp8_ds_mla") for x in (True, False))],
)
def test_latents_are_gathered(layout: str, latent: int, rope: int, dequantise: bool) -> None:
    cache = torch.zeros(3, 64, entry_width(layout, latent, rope)).to(cache_dtype(layout, BF16))
    every = torch.arange(3 * 64)
    _eager(latent, rope, layout).run_write_latent(_random(192, latent), _random(192, rope), cache, every, ONE)
    workspace = torch.zeros(77, latent + rope, dtype=BF16) if dequantise else torch.zeros(77, cache.shape[2]).to(cache)
    given = {**_gather(cache, ratio=4), "workspace": workspace, "k_scale": ONE}
    _both(layout, latent, rope, "pow2", "run_gather_latent", given, ["workspace"])


def test_index_keys_are_gathered_from_any_token_on() -> None:
    cache = torch.zeros(3, 64, 132, dtype=torch.uint8)
    _eager(128, 0, "fp8_index").run_write_index(_random(192, 128), cache, torch.arange(192))
    given = {**_gather(cache, ratio=2), "k": torch.zeros(77, 128).to(torch.float8_e4m3fn), "k_scale": torch.zeros(77)}
    _both("fp8_index", 128, 0, "pow2", "run_gather_index", given, ["k", "k_scale"])


@pytest.mark.parametrize("variant", _VARIANTS)
def test_top_k_conventions(variant: str) -> None:
    """130 rows of an odd number of columns, of which some see fewer than are selected, and some none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(130, 700, generator=generator)[:, :667]
    lengths = torch.randint(0, 640, (130, 2), generator=generator).int()[:, 0]
    starts = torch.arange(130, dtype=torch.int32) % 27 if variant == "prefill" else None
    found = []
    for kernel in (_VARIANTS[variant], EagerTopKBackend):
        backend = kernel(vllm_config=None)
        backend.prepare_metadata(TopKMetadata(lengths, starts, 640))
        found.append(backend.run_top_k_per_row(logits, 512))
    assert torch.equal(*found)
