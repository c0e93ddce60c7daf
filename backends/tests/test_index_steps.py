"""Top-k and preparations: EAGER's refusals, each with what was expected and what came."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.prepare import IndexPreparation, MLAPrepareSelectorConfig, PrepareMetadata
from mla_conformance.backends.topk import TopKMetadata

WINDOWS = TopKMetadata(torch.tensor([3, 5], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), 5)
LOGITS = torch.tensor([[9.0, 1.0, 3.0, 2.0, 9.0, 9.0], [0.0, -1.0, 4.0, 4.5, -7.0, 9.0]])


def select(logits: torch.Tensor = LOGITS, topk: int = 4, **changes: Any) -> torch.Tensor:
    backend = EagerTopKBackend(vllm_config=None)
    backend.prepare_metadata(replace(WINDOWS, **changes))
    return backend.run_top_k_per_row(logits, topk)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"logits": LOGITS[0]}, r"logits: expected \[T, C\] with neighbouring columns, got \[6\]"),
        ({"logits": LOGITS[:, ::2]}, "with neighbouring columns, got .* of strides .6, 2."),
        ({"lengths": WINDOWS.lengths.long()}, r"lengths: expected \[2\] of torch.int32, .* got \[2\] of torch.int64"),
        ({"row_starts": WINDOWS.lengths[:1]}, r"row_starts: expected \[2\] of torch.int32, .* got \[1\]"),
        ({"max_seq_len": 7}, "max_seq_len: expected at most the 6 columns, got 7"),
        ({"topk": 0}, "topk_tokens: expected a positive number, got 0"),
    ],
)
def test_a_top_k_refuses_what_does_not_fit(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select(**wrong)


def test_a_top_k_refuses_what_it_does_not_declare() -> None:
    with pytest.raises(UnsupportedConfiguration, match=r"dtype torch\.float64 not supported"):
        select(LOGITS.double())


TOKENS, HEADS, WIDTH = 3, 2, 64
MODEL = IndexPreparation(
    head_dim=WIDTH, rope_dim=16, rope_first=True, is_neox_style=True, hadamard=True, scale_format="pow2",
    fold_scales=True, eps=1e-6,
)  # fmt: skip


class Narrow(EagerPrepareBackend):
    """One width, never transformed."""

    supports_hadamard: ClassVar = [False]
    supported_head_dims: ClassVar = [128]


def prepare(model: IndexPreparation = MODEL, **changes: Any) -> tuple[torch.Tensor, ...]:
    backend = EagerPrepareBackend(num_heads=HEADS, scale=0.125, preparation=model, vllm_config=None)
    given = {
        "q": torch.ones(TOKENS, HEADS, WIDTH, dtype=torch.bfloat16),
        "k": torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16),
        "weights": torch.ones(TOKENS, HEADS),
        "k_norm_weight": torch.ones(WIDTH),
        "k_norm_bias": torch.ones(WIDTH),
        "positions": torch.zeros(TOKENS, dtype=torch.int64),
        "cos_sin_cache": torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), dim=1),
    } | changes
    backend.prepare_metadata(PrepareMetadata(given.pop("positions"), given.pop("cos_sin_cache")))
    return backend.run_prepare_index(**given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": torch.ones(TOKENS, WIDTH)}, r"k: expected \[3, 64\] of torch.bfloat16, got \[3, 64\] of torch.float32"),
        ({"q": torch.ones(TOKENS, 1, WIDTH)}, r"q: expected \[3, 2, 64\]"),
        ({"weights": torch.ones(TOKENS, HEADS, dtype=torch.float16)}, "weights: expected .* of torch.float32, got"),
        ({"k_norm_bias": torch.ones(WIDTH).bfloat16()}, r"k_norm_bias: expected \[64\] of torch.float32, got"),
        ({"positions": torch.zeros(TOKENS, dtype=torch.int32)}, r"positions: expected \[3\] of torch.int64, got"),
        ({"cos_sin_cache": torch.ones(1, 8)}, r"cos_sin_cache: expected \[1, 16\] of torch.float32, got \[1, 8\]"),
    ],
)
def test_a_preparation_refuses_what_does_not_fit(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(**wrong)


def test_a_preparation_refuses_scales_of_another_format_and_what_it_does_not_declare() -> None:
    with pytest.raises(ValueError, match="scale_format: expected one of float32, pow2, got 'ue4m3'"):
        prepare(MODEL._replace(scale_format="ue4m3"))
    reasons = Narrow.validate_configuration(None, MLAPrepareSelectorConfig(torch.bfloat16, HEADS, MODEL))
    assert reasons == ["head dim 64 not supported (supported: [128])", "hadamard=True not supported"]
