"""The golden layer of a family: its weights from theirs, its calls over a paged cache, the scores of its indexer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from mla_conformance.proof.families import INDEX_HEADS, INDEX_WIDTH, Family, IndexerForm
from mla_conformance.reference.index_scores import index_scores
from mla_conformance.reference.kv_cache import PagedContext, write_latents
from mla_conformance.reference.layer import LayerSpec, latents, mla_layer
from mla_conformance.reference.mla import Path
from mla_conformance.reference.projections import MLAWeights, rms_norm, split_kv_b_proj
from mla_conformance.reference.rope import Rotation, rope

_BLOCKS = torch.tensor([[5, 0, 3, 6, 1, 4]])
"""Pages in the order of the tokens; the cache has one more."""
_PAGE, _WORKSPACE = 4, 8
"""Tokens of a page, and of a chunk of the context."""


@dataclass(frozen=True)
class GoldenLayer:
    """A layer with their weights, for one sequence of hidden states [T, H] from position ``first``."""

    family: Family
    theirs: Mapping[str, Tensor]
    hidden: Tensor
    first: int

    def output(self, start: int, end: int, selected: Tensor | None, path: Path) -> Tensor:
        """[T, H] of tokens start … end - 1, those before them cached."""
        spec, weights = self.family.spec, golden_weights(self.theirs, self.family.spec)
        return mla_layer(
            self.hidden[start:end],
            self._positions[start:end],
            weights,
            spec,
            query_start_loc=(0, end - start),
            context=self._context(weights, start),
            path=path,
            selected=selected,
        )

    def scores(self, start: int, end: int) -> Tensor:
        """[T, S] index scores of tokens start … end - 1 for all up to the last of them, of a family with an indexer."""
        w, spec, form = self.theirs, self.family.spec, self.family.indexer
        assert form is not None
        q_c = rms_norm(self.hidden @ w["q_a_proj.weight"].mT, w["q_a_layernorm.weight"], spec.q_norm or 0.0)
        q = (q_c @ w["indexer.wq_b.weight"].mT).unflatten(1, (INDEX_HEADS, INDEX_WIDTH))
        norm = w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], form.epsilon
        k = layer_norm(self.hidden @ w["indexer.wk.weight"].mT, (INDEX_WIDTH,), *norm)
        weights = self.hidden @ w["indexer.weights_proj.weight"].mT * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
        q, k = (self._turned(x, form) for x in (q, k))
        starts = {"query_start_loc": (0, end - start), "key_start_loc": (0, end)}
        return index_scores(q[start:end], weights[start:end], k[:end], **starts).scores

    def _turned(self, x: Tensor, form: IndexerForm) -> Tensor:
        """Queries or keys of the indexer, their rotary part turned."""
        assert self.family.spec.rotation is not None
        rotation: Rotation = replace(self.family.spec.rotation, interleaved=form.interleaved)
        still = INDEX_WIDTH - rotation.dim
        if form.rope_last:
            return torch.cat((x[..., :still], rope(x[..., still:], self._positions, rotation)), dim=-1)
        return torch.cat((rope(x[..., : rotation.dim], self._positions, rotation), x[..., rotation.dim :]), dim=-1)

    @property
    def _positions(self) -> Tensor:
        return self.first + torch.arange(len(self.hidden))

    def _context(self, weights: MLAWeights, tokens: int) -> PagedContext:
        """The first tokens in pages; what no token wrote is NaN."""
        kv_c, k_pe = latents(self.hidden[:tokens], self._positions[:tokens], weights, self.family.spec)
        cache = torch.full((_BLOCKS.numel() + 1, _PAGE, kv_c.shape[1] + k_pe.shape[1]), torch.nan, dtype=torch.float64)
        token = torch.arange(tokens)
        write_latents(cache, kv_c, k_pe, _BLOCKS[0][token // _PAGE] * _PAGE + token % _PAGE)
        return PagedContext(cache, _BLOCKS, (tokens,), _WORKSPACE)


def golden_weights(theirs: Mapping[str, Tensor], spec: LayerSpec) -> MLAWeights:
    """Their weights by the names of the paper; a gate stands beside the queries or by itself."""
    heads, head = spec.dims.num_heads, spec.dims.head
    queries = next(name for name in ("q_b_proj", "q_proj", "q_gate_proj") if f"{name}.weight" in theirs)
    w_uq, w_qr, w_g = _by_head(theirs, queries, heads).tensor_split([head.qk_nope_head_dim, head.qk_head_dim], dim=-1)
    if "gate_proj.weight" in theirs:
        w_g = _by_head(theirs, "gate_proj", heads)
    w_uk, w_uv = split_kv_b_proj(_by_head(theirs, "kv_b_proj", heads), head.qk_nope_head_dim)
    w_dkv, w_kr = theirs["kv_a_proj_with_mqa.weight"].mT.tensor_split([spec.dims.kv_lora_rank], dim=-1)
    return MLAWeights(
        W_DQ=theirs["q_a_proj.weight"].mT if "q_a_proj.weight" in theirs else None,
        W_UQ=w_uq,
        W_QR=w_qr,
        W_DKV=w_dkv,
        W_UK=w_uk,
        W_KR=w_kr,
        W_UV=w_uv,
        W_O=theirs["o_proj.weight"].mT,
        q_norm=theirs.get("q_a_layernorm.weight"),
        kv_norm=theirs.get("kv_a_layernorm.weight"),
        W_G=w_g if w_g.shape[-1] else None,
        sink=theirs.get("sinks"),
    )


def _by_head(theirs: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """[in, N, out of each head]."""
    return theirs[f"{name}.weight"].mT.unflatten(1, (heads, -1))
