"""Cache operations refuse what does not fit before they write a byte, and a class may have some of them alone."""

from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_conformance.backends.cache import CACHE_CALLS, MLACacheBackend, MLACacheSelectorConfig
from mla_conformance.backends.declared import declared_errors
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.loading import roles_of
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role

BF16, INT = torch.bfloat16, torch.int32


def backend(layout: str = "auto", latent: int = 8, rope: int = 4) -> EagerCacheBackend:
    return EagerCacheBackend(latent, rope, layout, "float32", None)


def write(**changes: Any) -> dict[str, Any]:
    given = {
        "kv_c": torch.ones(3, 8, dtype=BF16),
        "k_pe": torch.ones(3, 4, dtype=BF16),
        "kv_cache": torch.zeros(2, 4, 12, dtype=BF16),
        "slot_mapping": torch.tensor([1, -1, 7]),
        "k_scale": torch.tensor(1.0),
    }
    return given | changes


def gather(**changes: Any) -> dict[str, Any]:
    given = {
        "kv_cache": torch.arange(96).view(2, 4, 12).to(BF16),
        "workspace": torch.zeros(6, 12, dtype=BF16),
        "block_table": torch.tensor([[1, 0], [0, -1]], dtype=INT),
        "cu_seq_lens": torch.tensor([0, 4, 5], dtype=INT),
        "seq_starts": torch.tensor([3, 0], dtype=INT),
        "k_scale": torch.tensor(1.0),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slot_mapping": torch.tensor([1, 8])}, r"slot_mapping: slot: expected -1 or 0..7, got 8"),
        ({"slot_mapping": torch.tensor([1, -2])}, r"slot_mapping: slot: expected -1 or 0..7, got -2"),
        ({"slot_mapping": torch.tensor([1.0])}, r"slot_mapping: expected \[T\] of int64 or int32, got \[1\] of"),
        ({"k_pe": torch.ones(3, 5, dtype=BF16)}, r"k_pe: expected \[3, 4\] of torch.bfloat16, got \[3, 5\]"),
        ({"slot_mapping": torch.arange(4)}, r"kv_c: expected a row for each of 4 slots, got shape \[3, 8\]"),
        ({"kv_cache": torch.zeros(2, 4, 13, dtype=BF16)}, r"kv_cache: expected \[2, 4, 12\] of torch.bfloat16, got"),
        (
            {"kv_cache": torch.zeros(2, 4, 12)},
            r"expected \[2, 4, 12\] of torch.bfloat16, got \[2, 4, 12\] of torch.float32",
        ),
    ],
)
def test_a_writer_refuses_what_does_not_fit(changes: dict[str, Any], said: str) -> None:
    given = write(**changes)
    before = given["kv_cache"].clone()
    with pytest.raises(ValueError, match=said):
        backend().run_write_latent(**given)
    assert torch.equal(given["kv_cache"], before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_table": torch.tensor([[1, 0]], dtype=INT)}, r"cu_seq_lens: expected \[2\] of torch.int32, got \[3\]"),
        (
            {"block_table": torch.tensor([[1, 0], [0, 0]])},
            r"block_table: expected \[2, 2\] of torch.int32, got \[2, 2\]",
        ),
        ({"block_table": torch.tensor([[1, 2], [0, 0]], dtype=INT)}, r"block_table: block: expected 0..1, got 2"),
        ({"seq_starts": torch.tensor([5, 0], dtype=INT)}, r"pages of a request: expected at most the table's 2, got 3"),
        ({"cu_seq_lens": torch.tensor([0, 4, 3], dtype=INT)}, r"cu_seq_lens: length: expected no less than 0, got -1"),
        ({"workspace": torch.zeros(6, 11, dtype=BF16)}, r"workspace: expected rows of 12 in torch.bfloat16 or"),
        ({"kv_cache": torch.zeros(2, 4, 11, dtype=BF16)}, r"kv_cache: expected \[2, 4, 12\] of torch.bfloat16, got"),
        ({"workspace": torch.zeros(4, 12, dtype=BF16)}, r"workspace: expected at least 5 rows, got 4"),
    ],
)
def test_a_gather_refuses_what_does_not_fit(changes: dict[str, Any], said: str) -> None:
    given = gather(**changes)
    with pytest.raises(ValueError, match=said):
        backend().run_gather_latent(**given)
    assert not given["workspace"].any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"positions": torch.tensor([3, 8, 0])},
            r"positions: position: expected 0..7, which the table has blocks for, got 8",
        ),
        ({"positions": torch.tensor([3, 4])}, r"positions: expected one for each of 3 tokens, got 2"),
        ({"positions": torch.zeros(3)}, r"positions: expected \[3\] of torch.int64, got \[3\] of torch.float32"),
        ({"slot_mapping": torch.zeros(2, dtype=INT)}, r"slot_mapping: expected one for each of 3 tokens, got 2"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping: expected int64 or int32, got torch.float32"),
        (
            {"query_start_loc": torch.tensor([0, 3], dtype=INT)},
            r"query_start_loc: expected \[3\] of torch.int32, got \[2\]",
        ),
    ],
)
def test_a_mapping_refuses_what_does_not_fit(changes: dict[str, Any], said: str) -> None:
    slot_mapping = torch.full((4,), 7)
    given: dict[str, Any] = {
        "slot_mapping": slot_mapping,
        "query_start_loc": torch.tensor([0, 2, 3], dtype=INT),
        "positions": torch.tensor([3, 4, 0]),
        "block_table": torch.tensor([[5, 2], [1, -1]], dtype=INT),
        "block_size": 4,
    }
    backend().run_slot_mapping(**given)
    assert slot_mapping.tolist() == [23, 8, 4, -1]
    with pytest.raises(ValueError, match=said):
        backend().run_slot_mapping(**given | changes)


def test_lists_of_another_dtype_and_requests_without_a_row_are_refused() -> None:
    table, out = torch.tensor([[3]], dtype=INT), torch.zeros(1, 2, dtype=INT)
    with pytest.raises(
        ValueError, match=r"token_indices: expected \[1, 2\] of torch.int32, got \[1, 2\] of torch.int64"
    ):
        backend().run_global_slots(out, torch.tensor([0], dtype=INT), table, torch.tensor([[0, 1]]), 4)
    with pytest.raises(ValueError, match=r"req_id_per_token: request: expected 0..0, got 1"):
        backend().run_global_slots(out, torch.tensor([1], dtype=INT), table, torch.tensor([[0, 1]], dtype=INT), 4)


def test_layouts_and_scales_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected one of auto, fp8, .* got 'fp5'"):
        backend("fp5")
    with pytest.raises(ValueError, match="tile_scales: expected one of float32, pow2, got 'bf16'"):
        EagerCacheBackend(8, 4, "auto", "bf16", None)


class WritesAlone(MLACacheBackend):
    """One call of six."""

    supported_calls: ClassVar = ["write_latent"]

    @staticmethod
    def get_name() -> str:
        return "ALONE"


def test_a_class_may_have_one_call_and_refuses_the_others() -> None:
    config = MLACacheSelectorConfig("write_latent", BF16, "auto", 64, 512, 64)
    assert WritesAlone.validate_configuration(None, config) == []
    for call in CACHE_CALLS[1:]:
        assert WritesAlone.validate_configuration(None, config._replace(call=call)) == [f"{call} not supported"]
    with pytest.raises(UnsupportedConfiguration, match="ALONE: write_index not supported"):
        WritesAlone(8, 0, "auto", "float32", None).run_write_index(*[torch.zeros(1)] * 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 not supported"),
        ({"slot_dtype": torch.int32}, "slots of torch.int32 not supported"),
        ({"dtype": torch.float64}, "dtype torch.float64 not supported"),
    ],
)
def test_what_is_not_declared_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    config = MLACacheSelectorConfig("write_latent", BF16, "auto", 64, 512, 64)._replace(**changes)
    assert WritesAlone.validate_configuration(None, config) == [reason]


def test_its_role_is_told_by_its_calls_and_its_lists_are_looked_through() -> None:
    named = f"{EagerCacheBackend.__module__}:EagerCacheBackend"
    assert roles_of(parse_reference(named)) == (Role.CACHE,)
    wrong = type("Wrong", (WritesAlone,), {"supported_calls": ["write"]})
    assert list(declared_errors(wrong)) == [
        f"supported_calls: expected some of {', '.join(CACHE_CALLS)}, got 'write'",
    ]


class _AsksNothing(TorchDispatchMode):
    """Refuses what a graph's capture refuses, where the device would have to answer."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lists = (x for arg in args if isinstance(arg, list | tuple) for x in arg if isinstance(x, torch.Tensor))
        assert not any(x.dtype == torch.bool for x in lists), operator
        assert not any(name in str(operator) for name in ("_local_scalar_dense", "nonzero")), operator
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("slots", [[7, -1, 2], [-1, -1, 5], [-1, -1, -1], []])
def test_eager_writes_entries_without_a_question_to_the_device(slots: list[int]) -> None:
    cache, entries = torch.arange(64.0).view(2, 4, 8), torch.randn(len(slots) + 1, 8)
    expected = cache.clone().view(8, 8)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = entries[row]
    with _AsksNothing():
        backend(rope=0)._store(cache, entries.view(torch.uint8), torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(cache.view(8, 8), expected)
