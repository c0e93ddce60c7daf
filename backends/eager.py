"""EAGER: an honest tile-wise online-softmax kernel in plain PyTorch, that rounds where a real kernel does.

It is the suite's null driver and the base of the known defects, which override a step, and never counts as certified.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import interface
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.generations import earlier, present
from mla_conformance.backends.kernel import NamedKernel, output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.operands import takes
from mla_conformance.reference.quantization import E4M3_MAX


class SoftmaxState(NamedTuple):
    """Running state of one request: [N, T, 1] maximum and sum, [N, T, V] unnormalised output; float32."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


class OnlineSoftmax:
    key_tile: ClassVar[int] = 128  # keys of one step
    scale: float  # softmax scale

    def _initial(self, q: Tensor, v: Tensor) -> SoftmaxState:
        shape = (q.shape[1], q.shape[0])
        maximum = q.new_full((*shape, 1), -torch.inf, dtype=torch.float32)
        weighted = q.new_zeros(*shape, v.shape[-1], dtype=torch.float32)
        return SoftmaxState(maximum, torch.zeros_like(maximum), weighted)

    def _tiles(self, keys: int) -> Iterator[slice]:
        for start in range(0, keys, self.key_tile):
            yield slice(start, min(start + self.key_tile, keys))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[N, T, tile] float32; products of 16-bit values are exact in float32."""
        return torch.einsum("tnd,snd->nts", q.float(), k.float()) * self.scale

    def _exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def _round_p(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        return p.to(dtype).float()

    def _maximum(self, state: SoftmaxState, scores: Tensor) -> Tensor:
        return torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))

    def _accumulate(self, state: SoftmaxState, scores: Tensor, v: Tensor) -> SoftmaxState:
        maximum = self._maximum(state, scores)
        # A row that has seen no key yet keeps -inf as its maximum; exp(-inf - 0) is the 0 that it needs.
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay = (state.maximum - shift).exp()
        p = self._exp(scores - shift)
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        total = state.total * decay + p.sum(dim=-1, keepdim=True)
        return SoftmaxState(maximum, total, state.weighted * decay + weighted)

    def _finish(self, state: SoftmaxState) -> tuple[Tensor, Tensor]:
        """Output [T, N, V] and LSE [N, T]; a row without keys is 0 and -inf."""
        output = (state.weighted / state.total).masked_fill(state.total == 0, 0.0)
        lse = state.maximum + state.total.log()
        return output.transpose(0, 1), lse.squeeze(-1)


class LatentSoftmax(OnlineSoftmax):
    kv_lora_rank: int  # L
    _model_dtype: torch.dtype

    def _values(self, keys: Tensor) -> Tensor:
        return keys[..., : self.kv_lora_rank]

    def _round_p(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """To the model's dtype, whatever the dtype of the dequantised values is."""
        return p.to(self._model_dtype).float()


class Eager(NamedKernel):
    name: ClassVar[str] = "EAGER"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True)


class EagerKernel(OnlineSoftmax, Eager, interface.PrefillKernelBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [*Eager.supported_dtypes, torch.float8_e4m3fn]
    writes_e4m3: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True, batch_invariant=True)

    @takes(interface.PrefillKernelBackend.run_prefill_new_tokens)
    def run_prefill_new_tokens(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        start_loc = self._prefill_metadata.query_start_loc.tolist()
        accumulated, lse = self._batch(x.q, x.k, x.v, start_loc, start_loc, causal=True)
        output = self._store(accumulated, x.q.dtype, x.out, x.output_scale)
        return (output, lse) if x.return_softmax_lse else output

    def merge_attn_states(
        self,
        output: Tensor,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        output_lse: Tensor | None = None,
    ) -> None:
        """Merge partial results [T, N, V] with LSEs [N, T], in float32, into ``output`` and ``output_lse``."""
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        # Two rows without keys: both weights must be 0, not exp(-inf - -inf).
        shift = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = [(part - shift).exp().mT.unsqueeze(-1) for part in (prefix_lse, suffix_lse)]
        # A weight of 0 does not clear what need not be a number.
        both = zip(weights, (prefix_output, suffix_output), strict=True)
        prefix, suffix = ((weight * part.float()).masked_fill(weight == 0, 0.0) for weight, part in both)
        output.copy_(prefix + suffix)
        if output_lse is not None:
            output_lse.copy_(lse)

    def _batch(
        self, q: Tensor, k: Tensor, v: Tensor, query_start_loc: list[int], key_start_loc: list[int], causal: bool
    ) -> tuple[Tensor, Tensor]:
        interface.check_operands(self, q, k, v, query_start_loc[-1], key_start_loc[-1])
        q, k, v = map(self._widened, (q, k, v))
        output = q.new_zeros(q.shape[0], self.num_heads, self.v_head_dim, dtype=torch.float32)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        for request in range(len(query_start_loc) - 1):
            rows = slice(query_start_loc[request], query_start_loc[request + 1])
            keys = slice(key_start_loc[request], key_start_loc[request + 1])
            output[rows], lse[:, rows] = self._finish(self._attend(q[rows], k[keys], v[keys], causal))
        return output, lse

    def _widened(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> SoftmaxState:
        state = self._initial(q, v)
        for tile in self._tiles(k.shape[0]):
            scores = self._scores(q, k[tile])
            if causal:
                scores = scores.masked_fill(~self._visible(q.shape[0], k.shape[0], tile, q.device), -torch.inf)
            state = self._accumulate(state, scores, v[tile])
        return state

    def _visible(self, queries: int, keys: int, tile: slice, device: torch.device) -> Tensor:
        """[T, tile] mask, bottom-right: query i sees keys 0 ... keys - queries + i."""
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries
        return torch.arange(tile.start, tile.stop, device=device) <= last

    def _store(
        self, accumulated: Tensor, dtype: torch.dtype, out: Tensor | None, output_scale: Tensor | None
    ) -> Tensor:
        if output_scale is None:
            result = accumulated.to(output_dtype(dtype))
        elif out is None or out.dtype != torch.float8_e4m3fn:
            got = "none" if out is None else str(out.dtype)
            raise interface.UnsupportedConfiguration(f"output_scale expects a float8_e4m3fn out tensor, got {got}")
        else:
            result = self._quantise(accumulated, output_scale)
        return result if out is None else out.copy_(result)

    def _quantise(self, accumulated: Tensor, output_scale: Tensor) -> Tensor:
        return (accumulated / output_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


class EagerPrefillBackend(EagerKernel, interface.MLAPrefillBackend):
    """EAGER behind the interface of this project; below it stands behind the others."""

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        context = self._prefill_metadata.chunked_context
        if context is None:
            raise ValueError(f"context chunk {chunk_idx} asked for, but the prepared metadata has no chunked context")
        query_start_loc = self._prefill_metadata.query_start_loc.tolist()
        key_start_loc = context.cu_seq_lens[chunk_idx].tolist()
        accumulated, lse = self._batch(q, k, v, query_start_loc, key_start_loc, causal=False)
        return self._store(accumulated, q.dtype, None, None), lse


class EagerPrefillImpl(earlier.MLAPrefillImpl):
    requires_v_padding = False
    kernel: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend  # what computes

    def __init__(self, *, device: torch.device, **sizes: Any) -> None:
        super().__init__(**sizes, device=device)
        self._kernel = self.kernel(**sizes)

    def run_prefill_new_tokens(
        self, prefill_metadata: MLACommonPrefillMetadata, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_new_tokens(q, k, v, return_softmax_lse)

    def run_prefill_context_chunk(
        self, prefill_metadata: MLACommonPrefillMetadata, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_context_chunk(chunk_idx, q, k, v)


class EarlierEagerPrefillBackend(NamedKernel, earlier.MLAPrefillBackend):
    name, variant = "EAGER", "earlier"
    supported_dtypes = EagerPrefillBackend.supported_dtypes
    declaration = EagerPrefillBackend.declaration

    @staticmethod
    def get_prefill_impl_cls() -> type[earlier.MLAPrefillImpl]:
        return EagerPrefillImpl


class PresentEagerPrefillBackend(EagerKernel, present.MLAPrefillBackend):
    variant = "present"

    def supports_out(self) -> bool:
        return True

    def run_prefill_context_chunk(
        self, chunk: present.ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        query_start_loc, key_start_loc = chunk.query_start_loc.tolist(), chunk.cu_seq_lens.tolist()
        accumulated, lse = self._batch(q, k, v, query_start_loc, key_start_loc, causal=False)
        return self._store(accumulated, q.dtype, out, None), lse
