"""EAGER: an honest tile-wise online-softmax kernel in plain PyTorch, that rounds where a real kernel does.

It is the suite's null driver and the base of the known defects, which override a step, and never counts as certified.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import interface, kernel, operands
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.online_softmax import Eager, OnlineSoftmax, SoftmaxState
from mla_conformance.reference import quantization


class EagerKernel(OnlineSoftmax, Eager, interface.PrefillKernelBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [*Eager.supported_dtypes, torch.float8_e4m3fn]
    writes_e4m3: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True, batch_invariant=True)

    @operands.takes(interface.PrefillKernelBackend.run_prefill_new_tokens)
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
            result = accumulated.to(kernel.output_dtype(dtype))
        elif out is None or out.dtype != torch.float8_e4m3fn:
            got = "none" if out is None else str(out.dtype)
            raise interface.UnsupportedConfiguration(f"output_scale expects a float8_e4m3fn out tensor, got {got}")
        else:
            result = self._quantise(accumulated, output_scale)
        return result if out is None else out.copy_(result)

    def _quantise(self, accumulated: Tensor, output_scale: Tensor) -> Tensor:
        return (accumulated / output_scale).clamp(-quantization.E4M3_MAX, quantization.E4M3_MAX).to(torch.float8_e4m3fn)


class EagerPrefillBackend(EagerKernel, interface.MLAPrefillBackend):
    """EAGER behind the interface of this project; ``generations`` has it behind the others."""

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        context = self._prefill_metadata.chunked_context
        if context is None:
            raise ValueError(f"context chunk {chunk_idx} asked for, but the prepared metadata has no chunked context")
        query_start_loc = self._prefill_metadata.query_start_loc.tolist()
        key_start_loc = context.cu_seq_lens[chunk_idx].tolist()
        accumulated, lse = self._batch(q, k, v, query_start_loc, key_start_loc, causal=False)
        return self._store(accumulated, q.dtype, None, None), lse
