"""A layer of transformers, called as a model calls it, and the golden layer with its weights.

A prefill, a decode step, an extension of what is cached. Whatever the dtype, the code of transformers asks for float32
in places. ``Widened`` has it compute in float64 there, but for places that it is told to keep.
"""

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mla_conformance.reference.cache_layout import write_rows
from mla_conformance.reference.indexer import index_scores
from mla_conformance.reference.layer import PagedContext, Path, WholeLayer, mla_layer
from mla_conformance.reference.projections import (
    IndexerSpec,
    IndexerWeights,
    MLAWeights,
    index_keys,
    index_queries,
    index_weights,
    latents,
    query_latent,
    split_kv_b_proj,
)
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.tests.proof.families import INDEX_HEADS, INDEX_WIDTH, ProofFamily

CALLS = (0, 14), (14, 15), (15, 21)
"""First token and end of each call of a layer that caches."""
TOKENS = CALLS[-1][1]
PLACES = {"RMSNorm": "norms", "RotaryEmbedding": "angles", "apply_rotary": "angles", "eager_attention": "softmax"}
PLACES |= {"Indexer": "index scores", "Attention.forward": "gate", "attn_scale": "query growth"}
"""The places in which their code asks for float32, by what the function's name has in it."""
_QUOTIENTS = Tensor.div, torch.div
_MODELS = "transformers.models."


class Widened(TorchFunctionMode):
    """Computes in float64 whatever asks for float32, and sees the scores that a top-k is taken of."""

    def __init__(self, kept: Collection[str] = ()) -> None:
        super().__init__()
        self.kept, self.places = kept, set[str]()  # places that stay in float32, and those that asked
        self.scores: Tensor | None = None  # of the last top-k

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.topk:
            self.scores = args[0]
        if _asks_for_float32(function, args, kwargs):
            place = _place(sys._getframe(1))
            self.places.add(place)
            if place not in self.kept:
                return _widened(function, args, kwargs)
        return function(*args, **kwargs)


@dataclass(frozen=True)
class TheirCall:
    """Of one call: output [T, H]; selected [T, K] tokens, -1 for none, and scores [T, S] of an indexer, else None."""

    output: Tensor
    selected: Tensor | None
    scores: Tensor | None


@dataclass(frozen=True)
class TheirRun:
    """Weights of a layer by name, what its calls gave, and the places in which its code asked for float32."""

    weights: dict[str, Tensor]
    calls: list[TheirCall]
    places: set[str]


def run_layer(family: ProofFamily, hidden: Tensor, *, first: int = 0, kept: Collection[str] = ()) -> TheirRun:
    """Random weights, and what they make of hidden [TOKENS, H] float64 at positions ``first`` and up, call by call.

    Raises ImportError without transformers, or with one that has no such model.
    """
    modules = importlib.import_module(f"{_MODELS}{family.module}.modeling_{family.module}")
    mode = Widened(kept)
    with mode, torch.no_grad():
        layer, config = _layer(family, modules)
        calls = list(_calls(family, modules, layer, config, hidden, first, mode))
    return TheirRun({name: weight.detach() for name, weight in layer.named_parameters()}, calls, mode.places)


def _layer(family: ProofFamily, modules: ModuleType) -> tuple[Any, Any]:
    config = getattr(modules, f"{family.prefix}Config")(**family.configuration, attn_implementation="eager")
    layer = getattr(modules, family.prefix + family.attention)(config, layer_idx=0).to(torch.float64).eval()
    draw_weights(layer)
    return layer, config


def draw_weights(layer: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[1] ** -0.5 if weight.dim() == 2 else 1.0, generator=generator)


def _calls(
    family: ProofFamily, modules: ModuleType, layer: Any, config: Any, hidden: Tensor, first: int, mode: Widened
) -> Iterator[TheirCall]:
    chosen: list[Tensor] = []
    if family.spec.selects:
        layer.indexer.register_forward_hook(lambda module, args, found: chosen.append(found[0]))
    rotary = getattr(modules, f"{family.prefix}RotaryEmbedding", None)
    turn = rotary and rotary(config)
    cache = importlib.import_module("transformers").DynamicCache(config=config)
    for start, end in CALLS:
        x, own = hidden[None, start:end], torch.arange(start, end)
        positions = first + own[None]
        given = {"hidden_states": x, "position_ids": positions, "position_embeddings": turn and turn(x, positions)}
        found = layer(**given, attention_mask=_mask(family, own, end), past_key_values=cache)
        selected = chosen[-1].long() if chosen else None
        if selected is not None:
            selected = selected.masked_fill(selected > own[:, None], NO_KEY)
        yield TheirCall(found[0][0], selected, mode.scores if mode.scores is None else mode.scores[0].double())


def _mask(family: ProofFamily, own: Tensor, end: int) -> Tensor:
    """[1, 1, T, S] added to scores, 0 or -inf; for a mask of padding [1, T], all true."""
    if family.padding_mask:
        return torch.ones(1, len(own), dtype=torch.bool)
    masks = importlib.import_module("transformers.masking_utils")
    window = family.spec.window
    seen = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    visible = seen(0, 0, own[:, None], torch.arange(end)[None])
    return torch.zeros(1, 1, len(own), end, dtype=torch.float64).masked_fill(~visible, -torch.inf)


def _place(frame: FrameType | None) -> str:
    """Where in the models' code a call comes from, in the words of PLACES."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_MODELS):
        frame = frame.f_back
    name = frame.f_code.co_qualname if frame else "none of the models"
    return next((place for part, place in PLACES.items() if part in name), name)


def _asks_for_float32(function: Any, args: Any, kwargs: Any) -> bool:
    if function in _QUOTIENTS:
        return not any(isinstance(x, Tensor) and x.is_floating_point() for x in args)
    return function is Tensor.float or any(x is torch.float32 for x in (*args, *kwargs.values()))


def _widened(function: Any, args: Any, kwargs: Any) -> Any:
    if function in _QUOTIENTS:
        return function(*(x.double() if isinstance(x, Tensor) else x for x in args), **kwargs)
    args = [torch.float64 if x is torch.float32 else x for x in args]
    kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
    return (Tensor.double if function is Tensor.float else function)(*args, **kwargs)


_BLOCKS = torch.tensor([[5, 0, 3, 6, 1, 4]])
"""Pages in the order of the tokens; the cache has one more."""
_PAGE, _WORKSPACE = 4, 8
"""Tokens of a page, and of a chunk of the context."""


@dataclass(frozen=True)
class GoldenLayer:
    """A layer with their weights, for one sequence of hidden states [T, H] from position ``first``."""

    family: ProofFamily
    theirs: Mapping[str, Tensor]
    hidden: Tensor
    first: int

    def output(self, start: int, end: int, selected: Tensor | None, path: Path) -> Tensor:
        """[T, H] of tokens start … end - 1, those before them cached."""
        spec, weights = self.family.spec, golden_weights(self.theirs, self.family.spec)
        context, tokens = self._context(weights, start), (self.hidden[start:end], self._positions[start:end])
        options: Any = {"context": context, "path": path, "selected": selected}
        return mla_layer(*tokens, weights, spec, query_start_loc=(0, end - start), **options)

    def scores(self, start: int, end: int) -> Tensor:
        """[T, S] index scores of tokens start … end - 1 for all up to the last of them, of a family with an indexer."""
        spec, form, weights = self.family.spec, self.family.indexer, golden_weights(self.theirs, self.family.spec)
        assert form is not None and spec.rotation is not None
        rotation = replace(spec.rotation, interleaved=form.interleaved)
        index = IndexerSpec(rotation=rotation, rope_last=form.rope_last, epsilon=form.epsilon)
        q_c = query_latent(self.hidden, weights, spec)[:, : spec.dims.q_lora_rank]
        own, rows = golden_index_weights(self.theirs), slice(start, end)
        q = index_queries(q_c[rows], self._positions[rows], own, index)
        k = index_keys(self.hidden[:end], self._positions[:end], own, index)
        starts = {"query_start_loc": (0, end - start), "key_start_loc": (0, end)}
        return index_scores(q.values, index_weights(self.hidden[rows], own), k.values, **starts).scores

    @property
    def _positions(self) -> Tensor:
        return self.first + torch.arange(len(self.hidden))

    def _context(self, weights: MLAWeights, tokens: int) -> PagedContext:
        """The first tokens in pages; what no token wrote is NaN."""
        rows = torch.cat(latents(self.hidden[:tokens], self._positions[:tokens], weights, self.family.spec), dim=-1)
        cache = torch.full((_BLOCKS.numel() + 1, _PAGE, rows.shape[1]), torch.nan, dtype=torch.float64)
        token = torch.arange(tokens)
        write_rows(cache, rows, _BLOCKS[0][token // _PAGE] * _PAGE + token % _PAGE)
        return PagedContext(cache, _BLOCKS, (tokens,), _WORKSPACE)


def golden_weights(theirs: Mapping[str, Tensor], spec: WholeLayer) -> MLAWeights:
    """Their weights by the names of the paper; a gate stands beside the queries or by itself."""
    heads, head = spec.dims.num_heads, spec.dims.head
    queries = next(name for name in ("q_b_proj", "q_proj", "q_gate_proj") if f"{name}.weight" in theirs)
    w_uq, w_qr, w_g = _by_head(theirs, queries, heads).tensor_split([head.qk_nope_head_dim, head.qk_head_dim], dim=-1)
    if "gate_proj.weight" in theirs:
        w_g = _by_head(theirs, "gate_proj", heads)
    w_uk, w_uv = split_kv_b_proj(_by_head(theirs, "kv_b_proj", heads), head.qk_nope_head_dim)
    w_dkv, w_kr = theirs["kv_a_proj_with_mqa.weight"].mT.tensor_split([spec.dims.kv_lora_rank], dim=-1)
    w_dq = theirs["q_a_proj.weight"].mT if "q_a_proj.weight" in theirs else None
    given: Any = {"W_G": w_g if w_g.shape[-1] else None, "W_O": theirs["o_proj.weight"].mT, "sink": theirs.get("sinks")}
    given |= {f"{name}_norm": theirs.get(f"{name}_a_layernorm.weight") for name in ("q", "kv")}
    return MLAWeights(W_DQ=w_dq, W_UQ=w_uq, W_QR=w_qr, W_DKV=w_dkv, W_UK=w_uk, W_KR=w_kr, W_UV=w_uv, **given)


def golden_index_weights(theirs: Mapping[str, Tensor]) -> IndexerWeights:
    return IndexerWeights(
        wq_b=theirs["indexer.wq_b.weight"].mT.unflatten(1, (INDEX_HEADS, INDEX_WIDTH)),
        wk=theirs["indexer.wk.weight"].mT,
        k_norm=theirs["indexer.k_norm.weight"],
        k_norm_bias=theirs["indexer.k_norm.bias"],
        weights_proj=theirs["indexer.weights_proj.weight"].mT,
    )


def _by_head(theirs: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """[in, N, out of each head]."""
    return theirs[f"{name}.weight"].mT.unflatten(1, (heads, -1))
