"""A call of a layer, its weights as a model holds them, and its class, driven as an engine drives it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.kernel import HEAD_DIMS
from mla_conformance.backends.layer import attention_impl, context_parallel, mla_batch
from mla_conformance.problems import calls, memory
from mla_conformance.problems.operands import ProblemError, rows_of
from mla_conformance.problems.written import CacheImage
from mla_conformance.reference import chunking
from mla_conformance.roles.layer.case import LayerCase, Order


class Linear:
    """A linear layer as vLLM has them: called, it returns its bias as well."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # [out, in]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.mT, None


class PackedLinear:
    """The same with its weight in codes, under the name that packed formats have for it."""

    def __init__(self, dense: Linear) -> None:
        largest = float(dense.weight.abs().max())
        self.unit = 2.0 ** math.ceil(math.log2(largest / 127))  # what a code of 1 stands for
        self.qweight = (dense.weight / self.unit).to(torch.int8)  # [out, in]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ (self.qweight.to(x.dtype) * self.unit).mT, None


@dataclass(frozen=True, kw_only=True)
class LayerCall(calls.CallOfARank):
    """``forward`` of a rank, its heads, requests and cache; what q, k and v mean in float64, as wide as P + R and V."""

    query: torch.Tensor  # [T, N·(P + R)], as handed over
    kv_c: torch.Tensor  # [T, L]
    k_pe: torch.Tensor  # [T, 1, R]
    weight: torch.Tensor  # [L, N, P + V] float64 of ``kv_b_proj``
    latents: torch.Tensor  # [S, L] float64, what k and v are projected from
    requests: tuple[mla_batch.LayerRequest, ...]  # the batch
    padding: int  # rows of padding behind it; -1 where no graph is used
    packed: bool = False  # whether ``kv_b_proj`` holds codes under another name
    written: Mapping[str, CacheImage]
    case: LayerCase

    means: ClassVar = {"q": "T", "k": "S", "v": "S", "latents": "S"}
    takes: ClassVar = ("query", "kv_c", "k_pe")

    @property
    def image(self) -> CacheImage:
        return self.written["kv_cache"]

    def regrouped(self, case: LayerCase, requests: Sequence[int], queries: int | None) -> Self:
        if case.ranks > 1:  # which entries a rank writes goes by the whole batch
            raise ProblemError(f"{case.id}: a batch on ranks cannot be regrouped; expected ranks=1 where requests are")
        new = rows_of(self.query_start_loc, requests)
        chosen = tuple(self.requests[request] for request in requests)
        contexts = [request.context_len for request in chosen if request.is_prompt]
        return replace(
            super().regrouped(case, requests, queries),
            **{name: getattr(self, name)[new] for name in self.takes},
            requests=chosen,
            padding=-1,
            written={"kv_cache": self.image.with_only(new)},
            merges=len(self.case.planned(contexts)),
        )

    def output_buffer(self) -> memory.Guarded | None:
        if not self.case.out:
            return None
        shape = (self.query.shape[0], self.q.shape[1] * self.v.shape[-1])
        return memory.Guarded.allocate(shape, self.query.dtype, self.query.device)

    def load(self, backend: Any) -> None:
        """Weights alone, where another layer's metadata are to serve: one row of [N·(P + V), L] for each column."""
        weight = self.weight.flatten(1).mT.to(self.query.dtype).to(self.query.device).contiguous()
        backend.load(PackedLinear(Linear(weight)) if self.packed else Linear(weight))

    def prepare(self, backend: Any) -> None:
        self.load(backend)
        backend.prepare(self)

    def on_rank(self, backend: Any) -> Any:
        return self.invoke(backend, None)

    def invoke(self, backend: Any, out: memory.Guarded | None) -> Any:
        self.reset()
        result = backend.forward(self, None if out is None else out.view)
        if isinstance(result, torch.Tensor) and result.shape[0] == self.query.shape[0]:
            result = result[: self.q.shape[0]].unflatten(-1, (self.q.shape[1], -1))
        return result

    def operands(self) -> calls.AttentionOperands:
        value_weights = self.weight[..., -self.v.shape[-1] :].abs().sum(dim=0).clamp(min=1.0).to(self.latents)
        whole = self.attended(
            causal=True,
            value_weights=value_weights,
            plans=tuple(map(self._ends, chunking.PLANNERS.values())) if self.merges and self.case.ranks == 1 else (),
        )
        if self.case.weights == "dense":
            return replace(whole, projection=(self.latents, self.weight.to(self.latents)))
        return whole

    def _ends(self, planner: Callable[..., Any]) -> tuple[tuple[int, ...], ...]:
        prefills = [number for number, request in enumerate(self.requests) if request.is_prompt]
        chunks = self.case.planned([self.requests[number].context_len for number in prefills], planner)
        ends: list[tuple[int, ...]] = [()] * (len(self.query_start_loc) - 1)  # those of padding among them
        for place, number in enumerate(prefills):
            each = ((chunk.starts[place], chunk.seq_lens[place]) for chunk in chunks)
            ends[number] = tuple(start + length for start, length in each if length)
        return tuple(ends)

    def joined(self, results: Sequence[Any], parts: Sequence[Any]) -> Any:
        expected = (*self.q.shape[:2], self.v.shape[-1])
        wrong = [result for result in results if getattr(result, "shape", None) != expected]
        return wrong[0] if wrong else torch.cat(list(results), dim=1)


_NOT_HERE = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank")


class Layer:
    """One layer of a model on one rank, driven as an engine drives it: its computation, its builder, its state."""

    impl: Any  # its computation, once weights were loaded
    builder: Any  # of the metadata, made with the computation
    metadata: Any  # of the batch that was prepared last

    def __init__(
        self,
        backend: Any,  # the class under test, an ``AttentionBackend``
        case: LayerCase,
        dtype: torch.dtype,
        device: torch.device,
        group: context_parallel.ContextParallelGroup | None = None,
    ) -> None:
        self.backend, self._case, self._device = backend, case, device
        self._group = group or context_parallel.OnlyRank()
        # The workspace, eight times the longest sequence that is admitted, has the case's tokens, and decodes may be as
        # long as the case's. Prefixes are cached; prompts are split only where decodes come first: either alone brings
        # prefills with context.
        self.config = config = mla_batch.layer_config(
            dtype=dtype,
            max_model_len=max(1, case.workspace // 8),
            head_size=sum(case.latent_dims),
            max_num_seqs=max(1, min(case.workspace // 4, case.workspace_tokens) // case.page),
            chunked_prefill_enabled=case.order == Order.DECODES_FIRST,
            block_size=case.page,
            cache_dtype=case.cache,
            enable_prefix_caching=True,
            ranks=case.ranks,
            interleave=case.interleave,
            drafted=max(case.decode_queries, default=1) - 1,
        )
        told = {name: getattr(config, name) for name in ("model_config", "scheduler_config", "cache_config")}
        runner = SimpleNamespace(**told, device=device)
        self.state = backend.get_state_cls()(runner) if hasattr(backend, "get_state_cls") else None
        self._linear: Linear | PackedLinear | None = None
        self._modules: dict[float, Any] = {}

    def load(self, linear: Linear | PackedLinear) -> None:
        """Load weights, or update dense ones in place, and process them; those it has stay as a call left them."""
        if isinstance(self._linear, Linear) and isinstance(linear, Linear):
            if torch.equal(self._linear.weight, linear.weight):
                return
            self._linear.weight.copy_(linear.weight)
        else:
            self._linear = linear
            case, dims, head_size = self._case, self._case.dimensions, self.config.model_config.head_size
            with context_parallel.dcp_group(self._group), mla_batch.set_current_config(self.config):
                self.impl = self.backend.get_impl_cls()(
                    num_heads=case.heads // case.ranks,
                    head_size=head_size,
                    scale=case.softmax_scale,
                    num_kv_heads=1,
                    kv_cache_dtype=case.cache,
                    attn_type=attention_impl.AttentionType.DECODER,
                    kv_lora_rank=case.kv_lora_rank,
                    kv_b_proj=linear,
                    **{name: getattr(dims, name) for name in (*HEAD_DIMS, "qk_head_dim")},
                    **dict.fromkeys(_NOT_HERE),
                )
                # Behind its layer, which some builders look up.
                spec = mla_batch.MLAAttentionSpec(block_size=case.page, head_size=head_size, cache_dtype_str=case.cache)
                self.builder = self.backend.get_builder_cls()(spec, ["layer"], self.config, self._device)
        self.impl.process_weights_after_loading(self.config.model_config.dtype)

    def prepare(self, call: LayerCall) -> None:
        case = self._case
        if case.order == Order.PREFILLS_FIRST:
            self.metadata = self.builder.build_from_requests(call.requests, call.padding)
            if self.state is not None:
                self.state.begin_forward(SimpleNamespace(attn_metadata=self.metadata, input_tokens=call.query))
            return
        common = mla_batch.common_metadata(
            call.requests,
            padding=max(call.padding, 0) * call.case.padding_counts,
            block_size=case.page,
            device=self._device,
            sharding=context_parallel.Sharding(case.ranks, call.rank, case.interleave),
        )
        self.metadata = self.builder.build(0, common)

    def forward(self, call: LayerCall, output: torch.Tensor | None) -> Any:
        given = {} if output is None else {"output": output}
        operands = (call.query, call.kv_c, call.k_pe, call.image.cache)
        return self.impl.forward(self.attention_layer(call.case), *operands, self.metadata, **given)

    def kernel_evidence(self) -> dict[str, str]:
        impl = getattr(self, "impl", None)
        reported: dict[str, str] = getattr(impl, "kernel_evidence", dict)()
        for role in ("prefill", "decode"):
            found: dict[str, str] = getattr(getattr(impl, role, None), "kernel_evidence", dict)()
            reported = reported | {f"{role} {name}": value for name, value in found.items()}
        return reported

    def attention_layer(self, case: LayerCase) -> Any:
        """The module with a case's scales, all different but k's; kept, as a captured graph reads its tensors."""
        if case.cache_scale not in self._modules:
            scales = {"q": 0.7, "k": case.cache_scale, "v": 1.9}
            tensors = {f"_{name}_scale": torch.tensor(x, device=self._device) for name, x in scales.items()}
            floats = {f"_{name}_scale_float": x for name, x in scales.items()}
            module = SimpleNamespace(**tensors, **floats, _prob_scale=torch.tensor(0.3, device=self._device))
            self._modules[case.cache_scale] = module
        return self._modules[case.cache_scale]


class LayersOnRanks:
    """The ranks in this process, one after another: each to its end, or in lockstep up to each exchange."""

    def __init__(self, layers: Sequence[Any], lockstep: context_parallel.Lockstep | None = None) -> None:
        self._layers, self._lockstep = layers, lockstep

    def prepare(self, parts: Sequence[Any]) -> None:
        for layer, part in zip(self._layers, parts, strict=True):
            part.prepare(layer)

    def forward(self, parts: Sequence[Any]) -> list[Any]:
        for part in parts:
            part.reset()
        steps = [partial(part.on_rank, layer) for layer, part in zip(self._layers, parts, strict=True)]
        return [step() for step in steps] if self._lockstep is None else self._lockstep.run(steps)

    def kernel_evidence(self) -> dict[str, str]:
        reported: dict[str, str] = getattr(self._layers[0], "kernel_evidence", dict)()
        return reported
