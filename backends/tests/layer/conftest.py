"""A small MLA layer over EAGER's kernels, and batches for it; the suite compares its results with the golden ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.backends import eager, eager_decode
from mla_conformance.backends.layer import attention_impl, mla_layer
from mla_conformance.backends.layer.context_parallel import Sharding
from mla_conformance.backends.layer.mla_batch import LayerRequest, MLAAttentionSpec, common_metadata, layer_config

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 3, 16, 8, 12, 32, 4


class Decode(eager_decode.EagerDecodeBackend):
    """Without several tokens of a request on ranks."""

    supports_causal_dcp = False


class Linear:
    """A linear layer as vLLM makes them: called, it returns its bias as well."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.mT, None


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class World:
    max_seqs: int = 4
    max_model_len: int = 4
    speculative: int | None = 7
    ranks: int = 1
    prefill: Any = eager.EagerPrefillBackend
    decode: Any = Decode

    def __post_init__(self) -> None:
        most = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_seqs, "block_size": PAGE}
        told: Any = {"head_size": LATENT + ROPE, "ranks": self.ranks, "drafted": self.speculative, **most}
        self.config = layer_config(dtype=torch.float32, **told)
        self.backend = mla_layer.mla_backend(self.prefill, self.decode)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
        self.weight = normal(99, LATENT, HEADS, NOPE + VALUE) / LATENT**0.5
        self.cache = torch.full((64, PAGE, LATENT + ROPE), torch.nan)

    def builder(self, rank: int = 0) -> Any:
        spec = MLAAttentionSpec(block_size=PAGE, head_size=LATENT + ROPE, cache_dtype_str="auto")
        builder = self.backend.get_builder_cls()(spec, ["layer.0"], self.config, CPU)
        builder.dcp_rank = rank
        return builder

    def runner(self, max_batch: int = 8, max_seq_len: int = 64) -> Any:
        return SimpleNamespace(
            model_config=self.config.model_config,
            scheduler_config=self.config.scheduler_config,
            cache_config=self.config.cache_config,
            device=CPU,
            graph_block_tables=np.zeros((max_batch, max_seq_len // PAGE), dtype=np.int32),
            max_seq_len_to_capture=max_seq_len,
        )

    def impl(self, **changes: Any) -> Any:
        unused = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank")
        arguments: dict[str, Any] = dict.fromkeys(unused) | {"num_heads": HEADS, "head_size": LATENT + ROPE}
        arguments |= {"scale": 0.31, "num_kv_heads": 1, "kv_cache_dtype": "auto", "attn_type": "decoder"}
        arguments |= {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
        arguments |= {"qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE}
        arguments |= {"kv_b_proj": Linear(self.weight.flatten(1).mT.contiguous())}
        impl = self.backend.get_impl_cls()(**(arguments | changes))
        impl.process_weights_after_loading(torch.float32)
        return impl


class Batch:
    """Requests (query length, context length, whether it prefills), each in blocks of its own."""

    def __init__(self, world: World, lengths: Sequence[tuple[int, int, bool]]) -> None:
        self.world, free = world, torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
        self.requests = [LayerRequest(q, c, [free.pop() for _ in range(-(-(q + c) // PAGE))], p) for q, c, p in lengths]

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N·D], kv_c [T, L], k_pe [T, 1, R] of the new tokens."""
        tokens = sum(request.query_len for request in self.requests)
        return normal(77, tokens, HEADS * (NOPE + ROPE)), normal(78, tokens, LATENT), normal(79, tokens, 1, ROPE)

    def common(self) -> attention_impl.CommonAttentionMetadata:
        return common_metadata(self.requests, padding=0, block_size=PAGE, device=CPU, sharding=Sharding())


@pytest.fixture
def same() -> Callable[..., None]:
    def check(a: Any, b: Any, name: str = "metadata") -> None:
        if isinstance(a, Tensor):
            # What a workspace holds is written by the kernels that use it.
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and ("workspace" in name or a.equal(b)), name
        elif is_dataclass(a):
            names = [x.name for x in fields(a) if not x.name.startswith("_cached")]
            names += [x for x in ("decode_metadata", "prefill_metadata") if hasattr(a, x)]
            for x in names:
                check(getattr(a, x), getattr(b, x), f"{name}.{x}")
        elif isinstance(a, tuple):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                check(x, y, name)
        else:
            assert a == b, name

    return check


world = pytest.fixture(name="world")(lambda: World)
batch = pytest.fixture(name="batch")(lambda: Batch)
