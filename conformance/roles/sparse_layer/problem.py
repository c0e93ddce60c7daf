"""From a sparse layer's case to its call: hidden states, both caches, and the buffer of selected tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_conformance.backends import roles, sparse, sparse_layer
from mla_conformance.cases.case import Call, Layout
from mla_conformance.judging import judge, record
from mla_conformance.problems import cached_batch, calls, memory, operands
from mla_conformance.problems.written import CacheImage, Latents, SelectedLists
from mla_conformance.reference import cache_layout, projections
from mla_conformance.reference.projections import expand_key, kv_b_proj, up_project
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.indexer.case import IndexerCase
from mla_conformance.roles.layer.call import LayersOnRanks
from mla_conformance.roles.prepare.problem import preparation
from mla_conformance.roles.sparse_layer import hidden_states
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase

_INDEX_SEED = 10**6
_INDEXER = {"head_dim": INDEX_DIM, "hadamard": False, "fold_scales": True}
_BEHIND = 2  # rows of the buffer behind those of the batch
_UNTOUCHED = 0x5A5A5A5A


@dataclass(frozen=True, kw_only=True)
class SparseLayerCall(calls.CallOfARank):
    """``run_sparse_layer``; q, k and v are what it attends with and to, [T, N, P + R], [S, N, P + R] and [S, N, V]."""

    weights: sparse_layer.SparseLayerWeights  # of the layer
    metadata: sparse_layer.MLASparseLayerMetadata
    written: Mapping[str, CacheImage | SelectedLists]
    case: SparseLayerCase

    interface: ClassVar = sparse_layer.MLASparseLayerBackend
    means: ClassVar = {"q": "T", "k": "", "v": "", "selected": "T"}  # lists name keys by number: all stay
    takes: ClassVar = ("hidden_states", "positions", "cos_sin_cache", "weights", "metadata")

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other requests, without padding; those that decode have to stand first."""
        call, rows = super().regrouped(case, requests, queries), operands.rows_of(self.query_start_loc, requests)
        decodes = sum(request < self.metadata.num_decodes for request in requests)
        written = {name: image.with_only(rows, call.query_start_loc) for name, image in self.written.items()}
        return replace(call, metadata=replace(call.metadata, num_decodes=decodes), written=written)

    def prepare(self, backend: sparse_layer.MLASparseLayerBackend) -> None:
        backend.load_weights(self.weights)
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: sparse_layer.MLASparseLayerBackend, out: memory.Guarded | None) -> Any:
        self.reset()
        return self.by_heads(self.on_rank(backend), self.weights.o_proj)

    def on_rank(self, backend: sparse_layer.MLASparseLayerBackend) -> Any:
        caches: dict[str, Any] = {"index_kv_cache": None}
        caches |= {name: image.cache for name, image in self.written.items()}
        return backend.run_sparse_layer(*self.given.values(), **caches)

    def fits(self, result: Any) -> bool:
        hidden = self.weights.o_proj.shape[0]
        return isinstance(result, Tensor) and result.shape == (len(self.hidden_states), hidden)

    def by_heads(self, result: Any, o_proj: Tensor) -> Any:
        """[T, N, V], as the output's weights [hidden, N · V] pick them; what does not fit as it is."""
        if not self.fits(result):
            return result
        factors, columns = o_proj.abs().max(dim=0).values, o_proj.abs().argmax(dim=0)
        signed = torch.copysign(factors, o_proj.gather(0, columns.unsqueeze(0))[0])
        return (result[: len(self.q), columns] / signed.to(result.dtype)).unflatten(1, (-1, self.v.shape[-1]))

    def wrong_writes(self) -> str:
        wrong = ((name, image.difference()) for name, image in self.written.items())
        return next((f"{name}: {what}" for name, what in wrong if what), "")

    def operands(self) -> calls.AttentionOperands:
        return self.attended(causal=False, value_weights=torch.ones_like(self.v[0]))

    def joined(self, results: Sequence[Any], parts: Sequence[Any]) -> Any:
        wrong = [result for result in results if not self.fits(result)]
        o_proj = torch.cat([part.weights.o_proj for part in parts], dim=1)
        return wrong[0] if wrong else self.by_heads(sum(results), o_proj)


class SparseLayerBatch(hidden_states.HiddenStates):
    def calls(self) -> tuple[calls.CallOfARank | calls.CallOnRanks]:
        w, form = self.weights, self.spec
        # kv_c [S, L] and k_pe [S, R] of the model's dtype.
        latent, rope = projections.latents(self.hidden, self.positions, w, form)
        kv_c, k_pe = latent.to(self.dtype), rope.to(self.dtype)
        # q [T, N, P + R] of the model's dtype, k [S, N, P + R] and v [S, N, V] float64; stored latents are as new.
        asked = projections.queries(self.query_latent(self.hidden), self.positions[self.new], w, form)
        k_nope, v = up_project(kv_c, kv_b_proj(w.W_UK, w.W_UV)).tensor_split([w.W_UK.shape[-1]], dim=-1)
        attended = torch.cat(asked, dim=-1).to(self.dtype), expand_key(k_nope, k_pe.double()), v
        on_device = [x.to(self.device) for x in attended]
        parts = tuple(self._call(rank, (kv_c, k_pe), on_device) for rank in range(self.case.tp))
        return (calls.CallOnRanks.of(parts),)

    def _call(self, rank: int, latents: Latents, attended: Sequence[Tensor]) -> SparseLayerCall:
        case = self.case
        latent, attention, slots = self._cache(self, latents)
        names = ("dtype", "q", "kv", "page", "pad", "poison", "inflate", "tails", "layers", "spare")
        of_index = IndexerCase(
            capability=Call.INDEX_TOPK,
            cache=case.index_cache,
            scales=case.index_scales,
            dims=f"{INDEX_DIM}-0-{INDEX_DIM}-{INDEX_DIM}",
            seed=case.seed + _INDEX_SEED,
            **{name: getattr(case, name) for name in names},
        )
        keys = self.keys.to(self.dtype)
        cached = cached_batch.CachedBatch(of_index, self.device, self.salt)
        index, indexing, index_slots = self._cache(cached, (keys, keys[:, :0]))
        q, k, v = (x.chunk(case.tp, dim=1)[rank] for x in attended)
        first = torch.tensor(operands.start_loc(case.totals)[:-1]).repeat_interleave(torch.tensor(case.q))
        x = self.padded(self.hidden[self.new]).unsqueeze(1)
        table = self.index_spec.rotation.table(torch.arange(max(case.totals)))
        return SparseLayerCall(
            q=q,
            k=k,
            v=v,
            query_start_loc=self.counted,
            key_start_loc=operands.start_loc(case.totals),
            selected=torch.where(self.lists == NO_KEY, NO_KEY, self.lists + first.unsqueeze(1)).to(self.device),
            given={
                "hidden_states": (x if case.layout == Layout.HEADS_FIRST else operands.lay_out("q", x, x, case))[:, 0],
                "positions": torch.nn.functional.pad(self.positions[self.new], (0, case.pad)).to(self.device),
                "cos_sin_cache": table.round().float().to(self.device),  # exact: pairs turn by quarters
            },
            weights=self._handed(rank),
            metadata=sparse_layer.MLASparseLayerMetadata(attention, indexing, slots, index_slots, case.decodes),
            written={
                "kv_cache": latent,
                **({} if case.shared else {"index_kv_cache": index}),
                "topk_indices_buffer": self._buffer(),
            },
            case=case,
            rank=rank,
        )

    def _handed(self, rank: int) -> sparse_layer.SparseLayerWeights:
        """The weights as a layer under test gets them on a rank: those of its heads, and all that have none."""

        def linear(*parts: Tensor) -> Tensor:
            return torch.cat([part.to(self.dtype) for part in parts], dim=-1).flatten(1).mT.contiguous().to(self.device)

        index, own = self.index, ("W_UQ", "W_QR", "W_UK", "W_UV")
        heads = {name: getattr(self.weights, name).chunk(self.case.tp, dim=1)[rank] for name in own}
        w = replace(self.weights, **heads, W_O=self.weights.W_O.chunk(self.case.tp)[rank])
        assert w.W_DQ is not None and w.q_norm is not None and w.kv_norm is not None
        indexer = sparse_layer.SparseIndexerWeights(
            wq_b=linear(index.wq_b),
            wk=linear(index.wk),
            k_norm_weight=index.k_norm.to(self.device, torch.float32),
            k_norm_bias=index.k_norm_bias.to(self.device, torch.float32),
            weights_proj=linear(index.weights_proj),
        )
        return sparse_layer.SparseLayerWeights(
            q_a_proj=linear(w.W_DQ),
            q_a_layernorm=w.q_norm.to(self.device, self.dtype),
            q_b_proj=linear(w.W_UQ, w.W_QR),
            kv_a_proj_with_mqa=linear(w.W_DKV, w.W_KR),
            kv_a_layernorm=w.kv_norm.to(self.device, self.dtype),
            kv_b_proj=linear(w.W_UK, w.W_UV),
            o_proj=linear(w.W_O),
            indexer=None if self.case.shared else indexer,
        )

    def _cache(
        self, batch: cached_batch.CachedBatch[Any], parts: Latents
    ) -> tuple[CacheImage, sparse.MLASparseMetadata, Tensor]:
        """A cache with what must stand in it afterwards, its metadata, and the slots [T] of new tokens and padding."""
        case = batch.case
        entries = cache_layout.encode(*parts, case.cache, case.cache_scale, case.scales)
        pages = cached_batch.write_pages(batch, entries, batch.totals, case.cache, case.page)
        image = CacheImage.of(case, pages, self.new, parts)
        told = batch.metadata(batch.totals)
        metadata = cached_batch.list_metadata(told, pages.block_table, roles.IndexSpace.POSITION)
        return image, metadata, torch.nn.functional.pad(image.slots, (0, self.case.pad), value=-1)

    def _buffer(self) -> SelectedLists:  # with what an earlier layer has left, where this one reuses it
        case, lists = self.case, self.lists.int().to(self.device)
        guarded = memory.Guarded.allocate((len(lists) + case.pad + _BEHIND, case.topk), torch.int32, self.device)
        guarded.view.fill_(_UNTOUCHED)
        if case.shared:
            guarded.view[: len(lists)] = lists
            guarded.view[len(lists) : len(lists) + case.pad] = NO_KEY
        short = [number >= case.decodes and total <= case.topk for number, total in enumerate(case.totals)]
        free = torch.tensor(short).repeat_interleave(torch.tensor(case.q)).to(self.device)
        return SelectedLists(
            guarded.view, guarded.storage.clone(), lists, free, case.pad, kept=case.shared, starts=self.counted
        )


class SparseLayerJudge(judge.AttentionJudge):
    """What it wrote first, since a wrong selection explains a wrong output, then its attention."""

    writes: ClassVar = record.Check.WRITTEN
    writes_first: ClassVar = True


class _SparseLayer(RoleDefinition):
    def kernel(self, kernel: Any, case: Any, dtype: torch.dtype, device: torch.device) -> Any:
        configs = [self.config_of(case, dtype, tp_rank=rank) for rank in range(case.tp)]
        layers = [kernel(config, vllm_config=None) for config in configs]
        return layers[0] if case.tp == 1 else LayersOnRanks(layers)


SPARSE_LAYER = _SparseLayer(
    role=roles.Role.SPARSE_LAYER,
    batch=SparseLayerBatch,
    config=sparse_layer.MLASparseLayerConfig,
    facts=lambda case, dtype: {
        "num_heads": case.heads // case.tp,
        "is_neox_style": case.layer_pairs == "halves",
        "rms_norm_eps": hidden_states.EPSILON,
        "preparation": preparation(case, case.index_scales, hidden_states.EPSILON, **_INDEXER),
        "tp_rank": 0,
    },
    judge=SparseLayerJudge,
)
