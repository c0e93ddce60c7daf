"""vLLM's cache and top-k kernels against stand-ins behind the schemas of its compiled library, as its sources say."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends import eager_cache, vllm_ops
from mla_conformance.backends.roles import Role

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
_VARIANTS: Any = vllm_ops.VllmTopKBackend.variants


def _eager(latent: int, rope: int, layout: str, scales: str = "pow2") -> eager_cache.EagerCacheBackend:
    return eager_cache.EagerCacheBackend(latent, rope, layout, scales, None)


def _write(kv_c: Any, k_pe: Any, cache: Any, slots: Any, layout: str, scale: Any, skip_scale: bool = False) -> None:
    assert slots.dtype == torch.int64 and not skip_scale
    assert len(slots), "a launch of no blocks is an error"
    rows = [x for x in (kv_c, k_pe) if x.numel()]
    assert layout != "fp8_ds_mla" or all(x.data_ptr() % 16 == x.stride(0) * 2 % 16 == 0 for x in rows)
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
def library(installed: Any) -> Iterator[None]:
    installed("vllm._C_stable_libtorch")
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


WRITTEN = (
    "latent_write:call=write_latent;page=16;q=[5,1];kv=[60,0];pad=1;layout=odd",
    "latent_write:call=write_latent;q=[0];kv=[3]",  # is no launch
)
GATHERED = "latent_gather:call=gather_latent;page=64;ratio=4;q=[70,0,5];kv=[260,2000,15]"
"""Of requests of which one has no entry, from inside of pages on."""
MEANT, _KEYS = f"{GATHERED};dequantise=1", "cache=fp8_index;dims=128-0-128-128;page=64"


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("cache=auto;dims=16-4-16-8", (*WRITTEN, GATHERED)),
        ("cache=fp8;kscale=250000", (*WRITTEN, GATHERED, MEANT)),
        ("cache=fp8_ds_mla;scales=pow2", (*WRITTEN, GATHERED, MEANT)),
        ("cache=fp8_ds_mla;scales=pow2;dims=128-0-128-512", WRITTEN),
    ],
)
def test_latents_are_written_and_gathered(layout: str, cases: tuple[str, ...], passes: Any) -> None:
    passes("VLLM_CACHE", Role.CACHE, *(f"{case};{layout}" for case in cases))


def test_index_keys_are_written_and_gathered_from_any_token_on(passes: Any) -> None:
    written = f"index_write:call=write_index;{_KEYS};q=[5,1];kv=[60,0];pad=1;layout=odd"
    gathered = f"index_gather:call=gather_index;{_KEYS};ratio=2;q=[70,0,5];kv=[130,500,7]"
    passes("VLLM_CACHE", Role.CACHE, written, f"{written};scales=pow2", gathered)


@pytest.mark.parametrize("variant", _VARIANTS)
def test_top_k_conventions(variant: str, passes: Any) -> None:
    """130 rows of which some see fewer columns than are selected, and some none."""
    packed = int(variant == "prefill")
    batch = f"q=[26,26,26,26,23];kv=[0,100,300,600,644];pad=3;layout=odd;topk=512;packed={packed}"
    passes(f"VLLM_TOPK[{variant}]", Role.TOPK, f"select:{batch}")
