"""Adapters of caches: EAGER's against the layouts, SGLang's against stand-ins that follow their source."""

from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends import cache_dtypes, eager_cache, roles, sglang_triton
from mla_conformance.backends.cache import CACHE_CALLS, MLACacheBackend, MLACacheSelectorConfig
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.reference.cache_layout import decode_rows, entry_width

BF16, INT = torch.bfloat16, torch.int32


def backend(layout: str = "auto", rope: int = 4) -> eager_cache.EagerCacheBackend:
    return eager_cache.EagerCacheBackend(8, rope, layout, "float32", None)


def int32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT)


ONE, _ONES = torch.tensor(1.0), torch.ones(3, 12, dtype=BF16)
# What each call takes, what it writes first.
_WRITE: dict[str, Any] = {"kv_cache": torch.zeros(2, 4, 12, dtype=BF16), "kv_c": _ONES[:, :8], "k_pe": _ONES[:, 8:]}
_WRITE |= {"slot_mapping": torch.tensor([1, -1, 7]), "k_scale": ONE}
_GATHER: dict[str, Any] = {"workspace": torch.zeros(6, 12, dtype=BF16), "k_scale": ONE}
_GATHER |= {"kv_cache": torch.arange(96).view(2, 4, 12).to(BF16), "block_table": int32([1, 0], [0, -1])}
_GATHER |= {"cu_seq_lens": int32(0, 4, 5), "seq_starts": int32(3, 0)}
_MAP: dict[str, Any] = {"slot_mapping": torch.full((4,), 7), "query_start_loc": int32(0, 2, 3), "block_size": 4}
_MAP |= {"positions": torch.tensor([3, 4, 0]), "block_table": int32([5, 2], [1, -1])}
_LISTS: dict[str, Any] = {"out": torch.zeros(1, 2, dtype=INT), "req_id_per_token": int32(0), "block_size": 4}
_LISTS |= {"block_table": int32([3]), "token_indices": int32([0, 1])}
CALLS = {"write_latent": _WRITE, "gather_latent": _GATHER, "slot_mapping": _MAP, "global_slots": _LISTS}
REFUSED: list[tuple[str, str, Any, str]] = [
    ("write_latent", "slot_mapping", torch.tensor([1, 8]), "slot_mapping: slot: expected -1 or 0..7, got 8"),
    ("write_latent", "slot_mapping", torch.tensor([1, -2]), "slot_mapping: slot: expected -1 or 0..7, got -2"),
    ("write_latent", "slot_mapping", torch.tensor([1.0]), r"expected \[T\] of int64 or int32, got \[1\] of"),
    ("write_latent", "k_pe", torch.ones(3, 5, dtype=BF16), r"k_pe: expected \[3, 4\] of torch.bfloat16, got \[3, 5\]"),
    ("write_latent", "slot_mapping", torch.arange(4), r"kv_c: expected a row for each of 4 slots, got shape \[3, 8\]"),
    ("write_latent", "kv_cache", torch.zeros(2, 4, 12), r"\[2, 4, 12\] of torch.bfloat16, got .* of torch.float32"),
    ("gather_latent", "block_table", int32([1, 0]), r"cu_seq_lens: expected \[2\] of torch.int32, got \[3\]"),
    ("gather_latent", "block_table", torch.ones(2, 2).long(), r"block_table: expected \[2, 2\] of torch.int32, got"),
    ("gather_latent", "block_table", int32([1, 2], [0, 0]), r"block_table: block: expected 0..1, got 2"),
    ("gather_latent", "seq_starts", int32(5, 0), r"pages of a request: expected at most the table's 2, got 3"),
    ("gather_latent", "cu_seq_lens", int32(0, 4, 3), r"cu_seq_lens: length: expected no less than 0, got -1"),
    ("gather_latent", "workspace", torch.zeros(6, 11, dtype=BF16), r"workspace: expected rows of 12 in torch.bfloat16"),
    ("gather_latent", "kv_cache", torch.zeros(2, 4, 11, dtype=BF16), r"kv_cache: expected \[2, 4, 12\] of"),
    ("gather_latent", "workspace", torch.zeros(4, 12, dtype=BF16), r"workspace: expected at least 5 rows, got 4"),
    ("slot_mapping", "positions", torch.tensor([3, 8, 0]), r"position: expected 0..7, which the table has blocks for"),
    ("slot_mapping", "positions", torch.tensor([3, 4]), r"positions: expected one for each of 3 tokens, got 2"),
    ("slot_mapping", "positions", torch.zeros(3), r"positions: expected \[3\] of torch.int64, got .* of torch.float"),
    ("slot_mapping", "slot_mapping", int32(0, 0), r"slot_mapping: expected one for each of 3 tokens, got 2"),
    ("slot_mapping", "slot_mapping", torch.zeros(3), r"slot_mapping: expected int64 or int32, got torch.float32"),
    ("slot_mapping", "query_start_loc", int32(0, 3), r"query_start_loc: expected \[3\] of torch.int32, got \[2\]"),
    ("global_slots", "token_indices", torch.tensor([[0, 1]]), r"token_indices: expected \[1, 2\] of torch.int32, got"),
    ("global_slots", "req_id_per_token", int32(1), r"req_id_per_token: request: expected 0..0, got 1"),
]


@pytest.mark.parametrize(("call", "name", "value", "said"), REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(call: str, name: str, value: Any, said: str) -> None:
    written = next(iter(CALLS[call]))
    given = {**CALLS[call], written: CALLS[call][written].clone(), name: value.clone()}
    before = given[written].clone()
    with pytest.raises(ValueError, match=said):
        getattr(backend(), f"run_{call}")(**given)
    assert torch.equal(given[written], before)


class WritesAlone(MLACacheBackend):
    supported_calls: ClassVar = ["write_latent"]

    @staticmethod
    def get_name() -> str:
        return "ALONE"


def test_a_class_may_have_one_call_and_refuses_the_others() -> None:
    config = MLACacheSelectorConfig("write_latent", BF16, "auto", 64, 512, 64)
    changes: dict[str, dict[str, Any]] = {f"{call} not supported": {"call": call} for call in CACHE_CALLS[1:]}
    changes |= {"kv_cache_dtype fp8 not supported": {"kv_cache_dtype": "fp8"}}
    changes |= {"slots of torch.int32 not supported": {"slot_dtype": INT}}
    changes |= {"dtype torch.float64 not supported": {"dtype": torch.float64}}
    assert WritesAlone.validate_configuration(None, config) == []
    for reason, change in changes.items():
        assert WritesAlone.validate_configuration(None, config._replace(**change)) == [reason]
    with pytest.raises(UnsupportedConfiguration, match="ALONE: write_index not supported"):
        WritesAlone(8, 0, "auto", "float32", None).run_write_index(*[torch.zeros(1)] * 3)


def test_a_kernel_reads_entries_as_the_reference_means_them_and_writes_without_a_question() -> None:
    """Two implementations of each form: bytes drawn without regard for what wrote them."""
    generator = torch.Generator().manual_seed(7)
    for layout, rope in (("fp8_ds_mla", 64), ("fp8_v4", 0), ("fp8_v41", 0), ("fp4_v41", 0)):
        shape = (9, 4, entry_width(layout, 512, rope))
        drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        rows = cache_dtypes.gather(drawn, torch.arange(36), layout)
        read = cache_dtypes.dequantise(rows, layout, torch.tensor(1.0), torch.bfloat16).double()
        meant = torch.cat(decode_rows(rows, layout, 1.0, 512, rope), dim=-1)
        # A kernel may flush a scale below 2^-126, which the largest code makes 448 times as large; above 2^128 is none.
        usual = meant.isfinite() & (meant.abs() < 2.0**127) & ((meant.abs() > 2.0**-117) | (meant == 0))
        torch.testing.assert_close(read[usual], meant[usual], rtol=2**-23, atol=0.0)
        assert float(usual.double().mean()) > 0.9
    # Tensors without numbers refuse what a graph's capture refuses, where the device would have to answer.
    given = torch.zeros(2, 4, 8), torch.zeros(4, 32, dtype=torch.uint8), torch.tensor([7, -1, 2])
    backend(rope=0)._store(*(x.to("meta") for x in given))


_LABEL, _OPS = "sglang 0.5.23", "sglang.kernels.ops"
LATENT, ROPE, PAGE = 512, 64, 16


class _Writer:
    """The kernel that writes rows: a program a row, -1 as its reserved index."""

    def __init__(self, recorded: Any) -> None:
        self._call = recorded(_LABEL, "sglang/kernels/ops/kvcache/mla_buffer.py:set_mla_kv_buffer_kernel", self._write)

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


@pytest.fixture
def library(recorded: Any, provided: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sglang_triton.SGLangTritonCacheBackend, "supports_compute_capability", lambda *_: True)

    def quantised(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        backend = eager_cache.EagerCacheBackend(LATENT, ROPE, "fp8_ds_mla", "float32", None)
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

    writer = {"set_mla_kv_buffer_kernel": _Writer(recorded)}
    provided(_LABEL, f"{_OPS}.kvcache.mla_buffer", {"get_mla_kv_buffer_triton": gathered}, **writer)
    provided(_LABEL, f"{_OPS}.quantization.dsa_quant_k_cache", {"quantize_k_cache_separate": quantised})
    provided(_LABEL, f"{_OPS}.attention.dsa.dequant_k_cache", {"dequantize_k_cache_paged_dsa": values})


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("layout", ["auto", "fp8_ds_mla"])
def test_latents_are_written_and_gathered(layout: str, passes: Any) -> None:
    fields, read = f"cache={layout};page=16", ";dequantise=1" if layout != "auto" else ""
    written = f"latent_write:call=write_latent;{fields};q=[5,1];kv=[60,0];pad=1;layout=sliced"
    gathered = f"latent_gather:call=gather_latent;{fields}{read};q=[20,0,17];kv=[7,0,20]"
    passes("SGLANG_TRITON_CACHE", roles.Role.CACHE, written, gathered)


@pytest.mark.usefixtures("library")
def test_what_is_not_declared_is_refused_before_it_is_written() -> None:
    cache = torch.zeros(2, PAGE, LATENT + ROPE, dtype=torch.float32)
    backend = sglang_triton.SGLangTritonCacheBackend(LATENT, ROPE, "auto", "float32", None)
    latents = torch.ones(1, LATENT), torch.ones(1, ROPE)
    with pytest.raises(UnsupportedConfiguration, match="dtype"):
        backend.run_write_latent(*latents, cache, torch.tensor([0]), ONE)
    assert not cache.any()
    with pytest.raises(UnsupportedConfiguration, match="10560 elements apart, no whole number of entries of 656, not"):
        backend = sglang_triton.SGLangTritonCacheBackend(LATENT, ROPE, "fp8_ds_mla", "float32", None)
        latents = torch.ones(1, LATENT).bfloat16(), torch.ones(1, ROPE).bfloat16()
        between = torch.zeros(2, PAGE * 656 + 64, dtype=torch.uint8)[:, : PAGE * 656].unflatten(1, (PAGE, 656))
        backend.run_write_latent(*latents, between, torch.tensor([0]), ONE)
