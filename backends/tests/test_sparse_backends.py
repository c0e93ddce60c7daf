"""What sparse backends refuse, and how entries are read; the suite compares their results with the golden ones."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.backends.torch_sdpa_sparse import TorchSDPASparseBackend
from mla_conformance.reference.cache_layout import decode_rows, entry_width

SCALE, PAGE, LENGTHS = 0.05, 4, (9, 0, 14)


def int32(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def metadata() -> MLASparseMetadata:
    """Two, one and three query tokens over 9, 0 and 14 cached ones."""
    return MLASparseMetadata(
        query_start_loc=int32([0, 2, 3, 6]),
        req_id_per_token=int32([0, 0, 1, 2, 2, 2]),
        seq_lens=int32(LENGTHS),
        block_table=int32([[3, 1, 5, -1], [-1, -1, -1, -1], [7, 2, 8, 4]]),
        workspace_starts=None,
        index_space=IndexSpace.SLOT,
        max_query_len=3,
        max_seq_len=14,
        query_lens_cpu=int32([2, 1, 3]),
        seq_lens_cpu=int32(LENGTHS),
    )


def operands() -> dict[str, torch.Tensor]:
    """What a call takes over a cache of the model's dtype, two slots a list."""
    q, cache = torch.zeros(6, 2, 576).bfloat16(), torch.zeros(9, PAGE, 576).bfloat16()
    indices = torch.full((6, 16), -1, dtype=torch.int32)
    indices[:, 0], indices[:, 1] = 5, 9
    return {"q": q, "kv_cache": cache, "k_scale": torch.tensor(1.0), "topk_indices": indices}


def made(backend: type[MLASparseBackend], layout: str = "auto", rope: int = 64, **further: Any) -> Any:
    sizes: dict[str, Any] = {"num_heads": 2, "scale": SCALE, "kv_lora_rank": 512, "qk_rope_head_dim": rope}
    heads: dict[str, Any] = {"qk_nope_head_dim": 128, "v_head_dim": 128}
    instance = backend(**sizes, **heads, kv_cache_dtype=layout, vllm_config=None, **further)
    instance.prepare_metadata(metadata())
    return instance


def test_a_kernel_reads_entries_as_the_reference_means_them() -> None:
    """Two implementations of each form: bytes drawn without regard for what wrote them."""
    generator = torch.Generator().manual_seed(7)
    for layout, rope in (("fp8_ds_mla", 64), ("fp8_v4", 0), ("fp8_v41", 0), ("fp4_v41", 0)):
        shape = (9, PAGE, entry_width(layout, 512, rope))
        drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
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
    given = operands()
    change(given)
    with pytest.raises(ValueError, match=said):
        made(EagerSparseBackend).run_sparse_decode(**given, return_softmax_lse=True)


def test_a_row_of_the_gathered_keys_that_is_not_there_is_refused() -> None:
    given, keys = operands(), torch.zeros(5, 1, 576).bfloat16()
    with pytest.raises(ValueError, match="topk_indices: expected 0 to 4, or -1, got 5 in row 0, column 0"):
        made(EagerSparseBackend).run_sparse_prefill(given["q"], keys, given["topk_indices"], True)


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown cache layout 'fp7'; expected one of auto, fp8, fp8_ds_mla, fp8_v4"):
        made(EagerSparseBackend, "fp7")
    with pytest.raises(ValueError, match="unknown cache layout 'fp7'"):
        made(EagerSparseBackend, extra_kv_cache_dtype="fp7")


def test_what_is_not_declared_is_refused_by_the_call_too() -> None:
    class Confined(EagerSparseBackend):
        supports_duplicates = False
        supported_heads: ClassVar[list[int]] = [64]

    given: Any = operands() | {"return_softmax_lse": True}
    with pytest.raises(UnsupportedConfiguration, match="TORCH_SDPA: sinks not supported"):
        made(TorchSDPASparseBackend).run_sparse_decode(**given, attn_sink=torch.zeros(2))
    with pytest.raises(UnsupportedConfiguration, match=r"EAGER: 2 heads not supported \(supported: \[64\]\)$"):
        made(Confined).run_sparse_decode(**given)
    given["topk_indices"][0, 1] = given["topk_indices"][0, 0]
    with pytest.raises(UnsupportedConfiguration, match="lists that name a key twice not supported"):
        made(Confined).run_sparse_decode(**given)
