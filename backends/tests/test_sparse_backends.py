"""The sparse backends of this project: what they compute and what they refuse; the suite asks for laws of lists."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.backends.selected import SelectedKeysBackend
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.backends.torch_sdpa_sparse import TorchSDPASparseBackend
from mla_conformance.reference.attention import merge
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.kv_cache import write_entries
from mla_conformance.reference.selected import selected_attention

SCALE, PAGE, LENGTHS = 0.05, 4, (9, 0, 14)
BACKENDS: list[type[SelectedKeysBackend]] = [EagerSparseBackend, TorchSDPASparseBackend]
backends = pytest.mark.parametrize("backend", BACKENDS)


def int32(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def metadata(**changes: Any) -> MLASparseMetadata:
    """Two, one and three query tokens over 9, 0 and 14 cached ones, in blocks 1 to 8."""
    given: dict[str, Any] = {
        "query_start_loc": int32([0, 2, 3, 6]),
        "req_id_per_token": int32([0, 0, 1, 2, 2, 2]),
        "seq_lens": int32(LENGTHS),
        "block_table": int32([[3, 1, 5, -1], [-1, -1, -1, -1], [7, 2, 8, 4]]),
        "workspace_starts": None,
        "index_space": IndexSpace.SLOT,
        "max_query_len": 3,
        "max_seq_len": 14,
        "query_lens_cpu": int32([2, 1, 3]),
        "seq_lens_cpu": int32(LENGTHS),
    }
    return MLASparseMetadata(**{**given, **changes})


SLOTS = [(3, 1, 5)[j // PAGE] * PAGE + j % PAGE for j in range(9)]
SLOTS += [(7, 2, 8, 4)[j // PAGE] * PAGE + j % PAGE for j in range(14)]


def operands(layout: str = "auto", rope: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [6, 2, D], a cache [9, 4, width], and keys [23, D] float64 of the tokens of requests 0 and 2."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 2, 512 + rope, generator=generator).bfloat16()
    values = torch.randn(23, 512 + rope, generator=generator).bfloat16()
    entries = encode(values[:, :512], values[:, 512:], layout, 0.02)
    cache = torch.full((9, PAGE, entries.shape[1]), torch.nan).to(entries.dtype)
    if cache.dtype is torch.uint8:
        cache.fill_(255)
    write_entries(cache, entries, torch.tensor(SLOTS), layout)
    return q, cache, torch.cat(decode_rows(entries, layout, 0.02, 512, rope), dim=-1)


def lists(columns: int = 16) -> torch.Tensor:
    """[6, columns] numbers of the 23 tokens, each row's of its own request; row 2 names none."""
    generator = torch.Generator().manual_seed(5)
    found = torch.full((6, columns), -1)
    for row, (first, count) in enumerate(((0, 9), (0, 9), (0, 0), (9, 14), (9, 14), (9, 14))):
        chosen = torch.randperm(count, generator=generator)[: 5 + row] + first
        found[row, : len(chosen)] = chosen
    return found


def slots_of(numbers: torch.Tensor) -> torch.Tensor:
    return torch.where(numbers < 0, -1, torch.tensor(SLOTS)[numbers.clamp(min=0)]).int()


def made(backend: type[MLASparseBackend], layout: str = "auto", rope: int = 64, **further: Any) -> Any:
    sizes: dict[str, Any] = {"num_heads": 2, "scale": SCALE, "kv_lora_rank": 512, "qk_rope_head_dim": rope}
    heads: dict[str, Any] = {"qk_nope_head_dim": 128, "v_head_dim": 128}
    instance = backend(**sizes, **heads, kv_cache_dtype=layout, vllm_config=None, **further)
    instance.prepare_metadata(metadata())
    return instance


def decoded(instance: Any, q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, **given: Any) -> Any:
    return instance.run_sparse_decode(q, cache, torch.tensor(0.02), indices, True, **given)


def close(found: Any, golden: Any) -> None:
    output, lse = found
    assert (output.shape, lse.shape, lse.dtype) == (golden.output.shape, golden.lse.shape, torch.float32)
    torch.testing.assert_close(output.double(), golden.output, atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse.double(), golden.lse, atol=0.03, rtol=0.0)


FORMATS = [("auto", 64), ("fp8", 64), ("fp8_ds_mla", 64), ("fp8_v4", 0), ("fp8_v41", 0), ("auto", 0)]


@backends
@pytest.mark.parametrize(("layout", "rope"), FORMATS)
def test_a_decode_is_attention_to_what_the_lists_name(backend: type[MLASparseBackend], layout: str, rope: int) -> None:
    q, cache, keys = operands(layout, rope)
    k = keys.unsqueeze(1)
    found = decoded(made(backend, layout, rope), q, cache, slots_of(lists()))
    close(found, selected_attention(q, k, k[..., :512], lists(), scale=SCALE))
    assert not found[0][2].any() and bool((found[1][:, 2] == -torch.inf).all())


def test_numbers_count_what_the_metadata_say() -> None:
    q, cache, _ = operands()
    instance = made(EagerSparseBackend)
    by_slot = decoded(instance, q, cache, slots_of(lists()))
    first = torch.tensor([0, 0, 0, 9, 9, 9]).unsqueeze(1)
    positions = torch.where(lists() < 0, -1, lists() - first).int()
    for space in (IndexSpace.POSITION, IndexSpace.RANK_LOCAL):
        instance.prepare_metadata(metadata(index_space=space))
        assert all(map(torch.equal, decoded(instance, q, cache, positions), by_slot))


def test_ranks_find_their_own_among_positions_and_merge_to_the_whole() -> None:
    """Rank r holds the tokens of one request whose position is r modulo 2, in its first block."""
    q, _, keys = operands()
    whole = selected_attention(q, keys[:8, None], keys[:8, None, :512], torch.tensor([[7, 2, 5]] * 6), scale=SCALE)
    parts = []
    for rank in range(2):
        instance, cache = made(EagerSparseBackend), torch.full((2, PAGE, 576), torch.nan, dtype=torch.bfloat16)
        cache[1] = keys[rank:8:2].bfloat16()
        common = {"index_space": IndexSpace.POSITION, "block_table": int32([[1], [1], [1]]), "dcp_world_size": 2}
        instance.prepare_metadata(metadata(**common, dcp_rank=rank, seq_lens=int32([4, 4, 4])))
        parts.append(decoded(instance, q, cache, int32([[7, 2, 5]] * 6)))
    output, lse = merge(*parts[0], *parts[1])
    torch.testing.assert_close(output.double(), whole.output, atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse.double(), whole.lse, atol=0.01, rtol=0.0)


def test_a_kernel_reads_entries_as_the_reference_means_them() -> None:
    """Two implementations of each form: bytes drawn without regard for what wrote them."""
    generator = torch.Generator().manual_seed(7)
    for layout, rope in (("fp8_ds_mla", 64), ("fp8_v4", 0), ("fp8_v41", 0), ("fp4_v41", 0)):
        _, cache, _ = operands(layout, rope)
        drawn = torch.randint(0, 256, cache.shape, generator=generator, dtype=torch.uint8)
        slots = torch.arange(36)
        rows = gather(drawn, slots, layout)
        read = dequantise(rows, layout, torch.tensor(1.0), torch.bfloat16).double()
        meant = torch.cat(decode_rows(rows, layout, 1.0, 512, rope), dim=-1)
        # A kernel may flush a scale below 2^-126, which the largest code makes 448 times as large; above 2^128 is none.
        usual = meant.isfinite() & (meant.abs() < 2.0**127) & ((meant.abs() > 2.0**-117) | (meant == 0))
        torch.testing.assert_close(read[usual], meant[usual], rtol=2**-23, atol=0.0)
        assert float(usual.double().mean()) > 0.9


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "not int32": (
        lambda o: o.update(topk_indices=o["topk_indices"].long()),
        "topk_indices: expected lists of torch.int32, got torch.int64",
    ),
    "too few lists": (
        lambda o: o.update(topk_indices=o["topk_indices"][:5]),
        r"topk_indices: expected a list for each of 6 query tokens, got shape \[5, 16\]",
    ),
    "outside": (
        lambda o: o["topk_indices"].__setitem__((1, 2), 36),
        "topk_indices: expected 0 to 35, or -1, got 36 in row 1, column 2",
    ),
    "below": (
        lambda o: o["topk_indices"].__setitem__((4, 0), -2),
        "topk_indices: expected 0 to 35, or -1, got -2 in row 4, column 0",
    ),
    "length beyond": (
        lambda o: o.update(topk_length=int32([3, 3, 0, 17, 3, 3])),
        "topk_length: expected 0 to 16, the columns of topk_indices, got 17 in row 3",
    ),
    "length of another dtype": (
        lambda o: o.update(topk_length=torch.ones(6)),
        r"topk_length: expected \[6\] of torch.int32, .* got \[6\] of torch.float32",
    ),
    "sink of another shape": (
        lambda o: o.update(attn_sink=torch.zeros(3)),
        r"attn_sink: expected \[2\] of torch.float32, a logit for each head, got \[3\] of torch.float32",
    ),
    "width of another layout": (
        lambda o: o.update(kv_cache=torch.zeros(9, 4, 656, dtype=torch.uint8)),
        r"kv_cache: expected \[blocks, page, 576\] of torch.bfloat16 for auto, got \[9, 4, 656\] of torch.uint8, "
        "which is as wide as fp8_ds_mla",
    ),
    "width of none": (
        lambda o: o.update(kv_cache=torch.zeros(9, 4, 600, dtype=torch.uint8)),
        r"got \[9, 4, 600\] of torch.uint8, which is as wide as no layout of such keys",
    ),
    "queries of another width": (
        lambda o: o.update(q=o["q"][..., :512]),
        r"q: expected 6 tokens of \[2, 576\] by the metadata, got \[6, 2, 512\]",
    ),
    "second cache without lists": (
        lambda o: o.update(extra_kv_cache=o["kv_cache"]),
        "extra_kv_cache: expected extra_topk_indices with it and its dtype at construction, got",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_operands_are_refused_with_what_was_expected(name: str) -> None:
    change, said = REFUSED[name]
    q, cache, _ = operands()
    given = {"q": q, "kv_cache": cache, "k_scale": torch.tensor(1.0), "topk_indices": slots_of(lists())}
    change(given)
    with pytest.raises(ValueError, match=said):
        made(EagerSparseBackend).run_sparse_decode(**given, return_softmax_lse=True)


def test_a_row_of_the_gathered_keys_that_is_not_there_is_refused() -> None:
    q, _, _ = operands()
    with pytest.raises(ValueError, match="topk_indices: expected 0 to 4, or -1, got 5 in row 0, column 0"):
        indices = torch.full((6, 16), 5, dtype=torch.int32)
        made(EagerSparseBackend).run_sparse_prefill(q, torch.zeros(5, 1, 576).bfloat16(), indices, True)


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown cache layout 'fp7'; expected one of auto, fp8, fp8_ds_mla, fp8_v4"):
        made(EagerSparseBackend, "fp7")
    with pytest.raises(ValueError, match="unknown cache layout 'fp7'"):
        made(EagerSparseBackend, extra_kv_cache_dtype="fp7")


def test_what_is_not_declared_is_refused_by_the_call_too() -> None:
    class Confined(EagerSparseBackend):
        supports_duplicates = False
        supported_heads: ClassVar[list[int]] = [64]

    q, cache, _ = operands()
    with pytest.raises(UnsupportedConfiguration, match="TORCH_SDPA: sinks not supported"):
        decoded(made(TorchSDPASparseBackend), q, cache, slots_of(lists()), attn_sink=torch.zeros(2))
    indices = slots_of(lists())
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: 2 heads not supported \(supported: \[64\]\)$"):
        decoded(made(Confined), q, cache, indices)
    indices[0, 1] = indices[0, 0]
    with pytest.raises(UnsupportedConfiguration, match="lists that name a key twice not supported"):
        decoded(made(Confined), q, cache, indices)
