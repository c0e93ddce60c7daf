"""The attention-layer interface: validation in its order, ranks, batches, builders and subclasses."""

from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.layer.attention_impl import AttentionImpl, AttentionMetadataBuilder
from mla_conformance.backends.layer.attention_layer import (
    AttentionBackend,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from mla_conformance.backends.layer.attention_types import (
    AttentionType,
    CommonAttentionMetadata,
)
from mla_conformance.backends.layer.context_parallel import Lockstep, dcp_group
from mla_conformance.backends.layer.layer_config import (
    CacheConfig,
    LayerConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mla_conformance.backends.platform import DeviceCapability


class Impl(AttentionImpl[Any]):
    can_return_lse_for_decode = True

    def __init__(self, num_heads: int = 1, *arguments: Any, **keywords: Any) -> None:
        self.num_heads = num_heads
        self.ranks_at_construction = (self.dcp_world_size, self.total_cp_rank)

    def forward(self, layer: Any, query: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return query


class Builder(AttentionMetadataBuilder[Any]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_prefix_len, common_attn_metadata, fast_build


class Backend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TEST"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size


class Picky(Backend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8"]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return False

    @classmethod
    def supports_combination(cls, *settings: Any, **named: Any) -> str | None:
        return "not together"


SETTINGS: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.float16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": AttentionType.DECODER,
}


def reasons(backend: type[AttentionBackend] = Backend, **changes: Any) -> list[str]:
    return backend.validate_configuration(**(SETTINGS | changes))


def test_the_reasons_come_in_the_order_of_vllm() -> None:
    found = reasons(
        Picky,
        dtype=torch.float32,
        use_mla=True,
        has_sink=True,
        use_sparse=True,
        use_mm_prefix=True,
        attn_type="encoder",
    )
    assert found == [
        "head_size not supported: got 64 (supported: 576)",
        "dtype not supported: got torch.float32 (supported: torch.float16, torch.bfloat16)",
        "kv_cache_dtype not supported: got auto (supported: fp8)",
        "block_size not supported: got 16 "
        "(supported: multiples of [MultipleOf(64)] among (1, 8, 16, 32, 64, 128, 256))",
        "partial multimodal token full attention not supported",
        "MLA not supported",
        "sink setting not supported",
        "sparse not supported",
        "compute capability not supported: got 9.0",
        "attention type encoder not supported",
        "not together",
    ]


def test_what_a_backend_insists_on_is_a_reason_too() -> None:
    insists = subclass_attention_backend_with_overrides(
        "Sparse", Backend, {"is_mla": classmethod(lambda cls: True), "is_sparse": classmethod(lambda cls: True)}
    )
    assert reasons(insists) == ["non-MLA not supported", "non-sparse not supported"]
    assert reasons(insists, use_mla=True, use_sparse=True) == []


@pytest.mark.parametrize(
    ("kernel", "block_size", "supported"),
    [
        ([MultipleOf(16)], 64, True),
        ([MultipleOf(64)], 32, False),
        ([16], 64, True),
        ([64], 16, False),
        ([], 8, True),
        ([MultipleOf(1)], 48, False),
        ([32, MultipleOf(8)], 8, True),
        ([64], None, True),
    ],
)
def test_a_configured_block_may_be_split(kernel: list[Any], block_size: int | None, supported: bool) -> None:
    sized = {"get_supported_kernel_block_sizes": staticmethod(lambda: kernel)}
    backend = subclass_attention_backend_with_overrides("Sized", Backend, sized)
    assert backend.supports_block_size(block_size) == supported


def test_no_cache_dtype_stands_for_any_and_an_empty_list_too() -> None:
    assert Picky.supports_kv_cache_dtype(None) and not Picky.supports_kv_cache_dtype("auto")
    assert subclass_attention_backend_with_overrides(
        "Any", Backend, {"supported_kv_cache_dtypes": []}
    ).supports_kv_cache_dtype("int4")


def test_a_subclass_with_another_builder() -> None:
    other = type("Other", (Builder,), {})
    backend = subclass_attention_backend("Chunked", Backend, other)
    assert backend.__name__ == "ChunkedBackend" and issubclass(backend, Backend)
    assert backend.get_builder_cls() is other and Backend.get_builder_cls() is Builder


def test_every_instance_knows_its_ranks_before_its_constructor_runs() -> None:
    alone = Impl(4)
    assert alone.ranks_at_construction == (1, 0) and not alone.need_to_return_lse_for_decode
    with dcp_group(Lockstep(4).groups[3]):
        impl = Impl(4)
    assert impl.ranks_at_construction == (4, 3) and impl.need_to_return_lse_for_decode
    assert Impl(4).ranks_at_construction == (1, 0)


def builder(speculative: int | None = None, ranks: int = 1) -> Builder:
    config = LayerConfig(
        model_config=ModelConfig(dtype=torch.float32, max_model_len=8, head_size=4),
        scheduler_config=SchedulerConfig(max_num_seqs=1),
        cache_config=CacheConfig(block_size=16),
        parallel_config=ParallelConfig(decode_context_parallel_size=ranks),
        speculative_config=None if speculative is None else SpeculativeConfig(num_speculative_tokens=speculative),
    )
    return Builder(None, ["a"], config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("speculative", "ranks", "arguments", "threshold"),
    [
        (3, 1, (1, True), 4),
        (3, 1, (6, True), 6),
        (3, 1, (1, False), 1),
        (None, 1, (2, True), 2),
        (3, 1, (None, True), None),
        (3, 2, (1, True), 1),
        (3, 2, (1, True, True), 4),
    ],
)
def test_the_reorder_threshold(speculative: Any, ranks: int, arguments: Any, threshold: Any) -> None:
    made = builder(speculative, ranks)
    made._init_reorder_batch_threshold(*arguments)
    assert made.reorder_batch_threshold == threshold


def test_a_builders_defaults() -> None:
    made = builder()
    assert made.build_for_cudagraph_capture("batch") == (0, "batch", False)  # type: ignore[arg-type]
    assert made.build_for_drafting("batch", 2) == (0, "batch", True)  # type: ignore[arg-type]
    assert Builder.get_cudagraph_support(None, None) == AttentionCGSupport.NEVER
    assert not made.use_cascade_attention(0, None, 1, 1, False, False, False, 1, 1)
    with pytest.raises(NotImplementedError, match="Builder cannot update a block table; build the metadata anew"):
        made.update_block_table(None, torch.empty(0), torch.empty(0))


def batch(**changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, 2, 3, 7, 7], dtype=torch.int32)
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor([5, 9, 4, 0], dtype=torch.int32),
        "num_reqs": 4,
        "num_actual_tokens": 8,
        "max_query_len": 4,
        "max_seq_len": 9,
        "block_table_tensor": torch.arange(8).reshape(4, 2),
        "slot_mapping": torch.arange(8),
    }
    return CommonAttentionMetadata(**(fields | changes))


def test_computed_tokens_are_computed_once() -> None:
    common = batch()
    computed = common.compute_num_computed_tokens()
    assert computed.tolist() == [3, 8, 0, 0] and common.compute_num_computed_tokens() is computed


def test_deprecated_copies_on_the_host_warn() -> None:
    common = batch()
    with pytest.warns(DeprecationWarning, match=r"seq_lens_cpu is deprecated.*use seq_lens\.cpu\(\)"):
        assert common.seq_lens_cpu.tolist() == [5, 9, 4, 0]
    with pytest.warns(DeprecationWarning, match="num_computed_tokens_cpu is deprecated"):
        assert common.num_computed_tokens_cpu.tolist() == [3, 8, 0, 0]


def test_a_batch_without_its_padding() -> None:
    rows = torch.arange(4)
    common = batch(dcp_local_seq_lens=rows, dcp_local_seq_lens_cpu=rows, encoder_seq_lens=rows, _seq_lens_cpu=rows)
    common.compute_num_computed_tokens()
    cut = common.unpadded(num_actual_tokens=7, num_actual_reqs=3)
    assert (cut.num_reqs, cut.num_actual_tokens, cut.slot_mapping.shape[0]) == (3, 7, 7)
    assert cut.query_start_loc.tolist() == cut.query_start_loc_cpu.tolist() == [0, 2, 3, 7]
    assert cut.block_table_tensor.shape == (3, 2) and cut.seq_lens.tolist() == [5, 9, 4]
    for name in ("dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "encoder_seq_lens", "_seq_lens_cpu"):
        assert getattr(cut, name).tolist() == [0, 1, 2]
    assert cut.encoder_seq_lens_cpu is None and cut.compute_num_computed_tokens().tolist() == [3, 8, 0]
    assert cut.seq_lens.data_ptr() == common.seq_lens.data_ptr()
