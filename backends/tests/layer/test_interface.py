"""The attention-layer interface: validation in its order, ranks, batches, builders and subclasses."""

from typing import Any

import pytest
import torch

from mla_conformance.backends import block_size, kernel
from mla_conformance.backends.layer import attention_layer
from mla_conformance.backends.layer.attention_impl import AttentionType, CommonAttentionMetadata
from mla_conformance.backends.layer.attention_layer import AttentionBackend


def answering(**answers: Any) -> type[AttentionBackend]:
    methods = {name: classmethod(lambda cls, *_, x=answer, **__: x) for name, answer in answers.items()}
    return attention_layer.subclass_attention_backend_with_overrides("Answering", AttentionBackend, methods)  # type: ignore[type-abstract]


def reasons(backend: type[AttentionBackend], **changes: Any) -> list[str]:
    settings: dict[str, Any] = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 16}
    settings |= dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix"), False)
    settings |= {"device_capability": kernel.DeviceCapability(9, 0), "attn_type": AttentionType.DECODER}
    return backend.validate_configuration(**(settings | changes))


def test_the_reasons_come_in_the_order_of_vllm_and_a_batch_without_its_padding() -> None:
    answers = {"get_supported_head_sizes": [576], "get_supported_kernel_block_sizes": [block_size.MultipleOf(64)]}
    picky = answering(**answers, supports_compute_capability=False, supports_combination="not together")
    picky.supported_kv_cache_dtypes = ["fp8"]
    asked = dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix"), True)
    assert reasons(picky, dtype=torch.float32, attn_type="encoder", **asked) == [
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
    assert picky.supports_kv_cache_dtype(None) and not picky.supports_kv_cache_dtype("auto")
    insists = answering(is_mla=True, is_sparse=True)
    assert reasons(insists) == ["non-MLA not supported", "non-sparse not supported"]
    assert reasons(insists, use_mla=True, use_sparse=True) == reasons(answering()) == []
    starts, rows = torch.tensor([0, 2, 3, 7, 7], dtype=torch.int32), torch.arange(4)
    named: dict[str, Any] = dict.fromkeys(("dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "encoder_seq_lens"), rows)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([5, 9, 4, 0], dtype=torch.int32),
        num_reqs=4, num_actual_tokens=8, max_query_len=4, max_seq_len=9,
        block_table_tensor=torch.arange(8).reshape(4, 2), slot_mapping=torch.arange(8), **named,
    )  # fmt: skip
    with pytest.warns(DeprecationWarning, match=r"seq_lens_cpu is deprecated.*use seq_lens\.cpu\(\)"):
        assert common.seq_lens_cpu.tolist() == [5, 9, 4, 0]
    computed = common.compute_num_computed_tokens()
    assert computed.tolist() == [3, 8, 0, 0] and common.compute_num_computed_tokens() is computed
    cut = common.unpadded(num_actual_tokens=7, num_actual_reqs=3)
    assert (cut.num_reqs, cut.num_actual_tokens, cut.slot_mapping.shape[0]) == (3, 7, 7)
    assert cut.query_start_loc.tolist() == cut.query_start_loc_cpu.tolist() == [0, 2, 3, 7]
    assert cut.block_table_tensor.shape == (3, 2) and cut.seq_lens.tolist() == [5, 9, 4]
    assert all(getattr(cut, name).tolist() == [0, 1, 2] for name in named)
    assert cut.encoder_seq_lens_cpu is None and cut.compute_num_computed_tokens().tolist() == [3, 8, 0]
    assert cut.seq_lens.data_ptr() == common.seq_lens.data_ptr()
