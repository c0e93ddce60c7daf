"""The sparse layers of DeepSeek-V3.2 and GLM-5, as Hugging Face's transformers has them, against the golden definition.

Their modules go from hidden states to hidden states over expanded keys, with a mask for what is not selected; here the
same weights go through golden RoPE, `index_scores`, and `selected_attention` over latents. Whatever the dtype, their
code has float32 in it: in the RMSNorm of both latents, RoPE's angles, the indexer's scores and eager attention's
softmax. ``Widened`` runs that code with float64 in its place, and only the order of sums is left to differ in. Theirs
has neither the fp8 codes nor the Hadamard rotation of the indexers that are deployed, so neither is compared.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.overrides import TorchFunctionMode

from mla_conformance.reference.index_scores import index_scores
from mla_conformance.reference.projections import absorb_query, split_kv_b_proj, up_project_output
from mla_conformance.reference.rope import rope
from mla_conformance.reference.selected import NO_KEY, selected_attention

HIDDEN, Q_RANK, L, N, P, R, V = 48, 32, 24, 4, 16, 8, 12
INDEX_HEADS, INDEX_WIDTH, TOPK = 3, 20, 5
DIMENSIONS = {
    "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": N, "num_key_value_heads": N,
    "q_lora_rank": Q_RANK, "kv_lora_rank": L, "qk_nope_head_dim": P, "qk_rope_head_dim": R, "v_head_dim": V,
    "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": TOPK,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
CALLS = (0, 14), (14, 15), (15, 21)
"""Tokens of each call of a layer that caches: a prefill, a decode step, an extension."""
EPSILON = 1e-6


class Observed(TorchFunctionMode):
    """Sees the scores that a top-k is taken of, and what it chooses, which the modules keep to themselves."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.call(function, args, kwargs or {})
        if function is Tensor.topk:
            self.scores, self.indices = args[0][0], found.indices[0]
        return found

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Widened(Observed):
    """Observes, and computes in float64 whatever asks for float32."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        return function(*args, **{name: torch.float64 if v is torch.float32 else v for name, v in kwargs.items()})


def run_layer(model: str, prefix: str, hidden: Tensor, mode: Observed) -> tuple[Any, list[SimpleNamespace]]:
    """Random weights of a layer, and what it made of each call: output, scores, indices."""
    library = pytest.importorskip("transformers", reason="needs the extra 'models'")
    modules = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", reason="needs a newer transformers")
    config = getattr(library, f"{prefix}Config")(**DIMENSIONS, attn_implementation="eager")
    generator, calls = torch.Generator().manual_seed(3), []
    with mode, torch.no_grad():
        layer = getattr(modules, f"{prefix}Attention")(config, layer_idx=0).to(torch.float64).eval()
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[1] ** -0.5 if weight.dim() == 2 else 1.0, generator=generator)
        rotary, cache = getattr(modules, f"{prefix}RotaryEmbedding")(config), library.DynamicCache(config=config)
        for start, end in CALLS:
            x, positions = hidden[None, start:end], torch.arange(start, end)[None]
            unseen = torch.full((1, 1, end - start, end), -torch.inf, dtype=torch.float64).triu(start + 1)
            output = layer(x, rotary(x, positions), unseen, past_key_values=cache, position_ids=positions)[0]
            calls.append(SimpleNamespace(output=output[0], scores=mode.scores, indices=mode.indices))
    return {name: weight.detach() for name, weight in layer.named_parameters()}, calls


def golden_indexer(w: Any, q_c: Tensor, hidden: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], weights [T, H] with both constant factors in them, and keys [T, D]."""
    q = (q_c @ w["indexer.wq_b.weight"].mT).unflatten(1, (INDEX_HEADS, INDEX_WIDTH))
    norm, positions = (w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], EPSILON), torch.arange(len(hidden))
    k = layer_norm(hidden @ w["indexer.wk.weight"].mT, (INDEX_WIDTH,), *norm)
    q, k = (torch.cat((rope(x[..., :R], positions, interleaved=interleaved), x[..., R:]), dim=-1) for x in (q, k))
    return q, hidden @ w["indexer.weights_proj.weight"].mT * (INDEX_HEADS * INDEX_WIDTH) ** -0.5, k


def golden_operands(w: Any, q_c: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed queries [T, N, L+R], latents with their rotary part [T, 1, L+R], and W_UV."""
    positions = torch.arange(len(hidden))
    q_nope, q_pe = (q_c @ w["q_b_proj.weight"].mT).unflatten(1, (N, P + R)).split([P, R], dim=-1)
    kv_c, k_pe = (hidden @ w["kv_a_proj_with_mqa.weight"].mT).split([L, R], dim=-1)
    w_uk, w_uv = split_kv_b_proj(w["kv_b_proj.weight"].mT.unflatten(1, (N, P + V)), P)
    kv_c = rms_norm(kv_c, (L,), w["kv_a_layernorm.weight"], EPSILON)
    q = torch.cat((absorb_query(q_nope, w_uk), rope(q_pe, positions, interleaved=True)), dim=-1)
    return q, torch.cat((kv_c, rope(k_pe, positions, interleaved=True)), dim=-1).unsqueeze(1), w_uv


@pytest.mark.parametrize(("mode", "tolerance"), [(Widened, 1e-13), (Observed, 1e-5)])
@pytest.mark.parametrize(
    ("model", "prefix", "interleaved"), [("deepseek_v32", "DeepseekV32", False), ("glm_moe_dsa", "GlmMoeDsa", True)]
)
def test_a_models_layer_is_the_golden_one(
    model: str, prefix: str, interleaved: bool, mode: type[Observed], tolerance: float, normal: Any
) -> None:
    hidden = normal(1, CALLS[-1][1], HIDDEN)
    w, calls = run_layer(model, prefix, hidden, mode())
    q_c = rms_norm(hidden @ w["q_a_proj.weight"].mT, (Q_RANK,), w["q_a_layernorm.weight"], EPSILON)
    index_q, index_weights, index_k = golden_indexer(w, q_c, hidden, interleaved)
    q, k, w_uv = golden_operands(w, q_c, hidden)
    for (start, end), theirs in zip(CALLS, calls, strict=True):
        new = slice(start, end)
        starts = {"query_start_loc": (0, end - start), "key_start_loc": (0, end)}
        golden = index_scores(index_q[new], index_weights[new], index_k[:end], **starts).scores
        selected = theirs.indices.masked_fill(theirs.scores.gather(1, theirs.indices).isinf(), NO_KEY)
        state = selected_attention(q[new], k[:end], k[:end, :, :L], selected, scale=(P + R) ** -0.5)
        output = up_project_output(state.output, w_uv).flatten(1) @ w["o_proj.weight"].mT
        torch.testing.assert_close(theirs.scores.to(torch.float64), golden, rtol=0, atol=tolerance)
        torch.testing.assert_close(golden.gather(1, theirs.indices), golden.topk(TOPK).values, rtol=0, atol=tolerance)
        torch.testing.assert_close(theirs.output, output, rtol=0, atol=tolerance)
