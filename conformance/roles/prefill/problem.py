"""From a prefill case to its calls: random operands, or latents from a paged cache, up-projected chunk by chunk."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.foreign import yes_or_no
from mla_conformance.backends.interface import MLAPrefillSelectorConfig
from mla_conformance.backends.kernel import DeviceCapability, output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call
from mla_conformance.problems.operands import (
    KEYS,
    VALUES,
    Draw,
    Site,
    edges,
    fill_normal,
    lay_out,
    segments,
    start_loc,
    stored,
)
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.prefill.call import PrefillCall, assemble_metadata, one_chunk
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.roles.prefill.context import ContextKeys, latent_context

_COUNTED_ELEMENTS = 2**24
"""Elements of the keys from which inputs are drawn on the device, by counters."""


class PrefillBatch(Draw[PrefillCase]):
    """The batch of a prefill case."""

    def calls(self) -> tuple[PrefillCall, ...]:
        """New tokens or a chunk of context; or new tokens, then every chunk."""
        if self.case.call == Call.CHUNKED_CONTEXT:
            return self._chunked()
        chunk_idx, lengths = (None, self.case.q) if self.case.call == Call.NEW_TOKENS else (0, self.case.kv)
        locations = start_loc(lengths)
        dims = self.case.dimensions
        k, v = (self._normal(locations[-1], self.case.heads, width) for width in (dims.qk_head_dim, dims.v_head_dim))
        keys = self._cast((self.by_request(KEYS, k, locations), self.by_request(VALUES, v, locations)))
        q = self._queries([keys[0][keys_of] for keys_of in segments(locations)])
        chunks = () if chunk_idx is None else one_chunk(lengths)
        metadata = assemble_metadata(self.case, self.case.q, chunks, self.dtype, self.device)
        return (self._call(chunk_idx, q, keys, locations, metadata, self._output_scale()),)

    def _chunked(self) -> tuple[PrefillCall, ...]:
        # The cache holds the model's dtype; operands in e4m3 are cast from it where the kernel is called.
        context = latent_context(self, output_dtype(self.dtype))
        new, *chunks = [self._cast(keys) for keys in (context.new_tokens, *context.chunk_keys)]
        locations = [tuple(chunk.key_start_loc) for chunk in context.chunks]
        queries = start_loc(self.case.q)
        per_request = (
            torch.cat([k[loc[r] : loc[r + 1]] for (k, _), loc in zip(chunks, locations, strict=True)] + [new[0][rows]])
            for r, rows in enumerate(segments(queries))
        )
        q, scale = self._queries(per_request), self._output_scale()
        metadata = assemble_metadata(self.case, self.case.q, context.chunks, self.dtype, self.device, context)
        calls = [self._call(None, q, new, queries, metadata, scale)]
        calls += [
            self._call(index, q, keys, loc, metadata, scale)
            for index, (keys, loc) in enumerate(zip(chunks, locations, strict=True))
        ]
        return tuple(calls)

    def _output_scale(self) -> torch.Tensor | None:
        if self.case.quant == "none":
            return None
        return torch.tensor(self.case.oscale / 1e6, dtype=torch.float32, device=self.device)

    def _cast(self, keys: ContextKeys) -> ContextKeys:
        k, v = keys
        return stored(k, self.dtype), stored(v, self.dtype)

    def _normal(self, *shape: int) -> torch.Tensor:
        if math.prod(shape) < _COUNTED_ELEMENTS:
            return torch.randn(*shape, generator=self.generator)
        seed = int(torch.randint(2**20, (), generator=self.generator))
        drawn = fill_normal(torch.empty(shape, dtype=self.dtype, device=self.device), seed)
        return drawn.to(output_dtype(self.dtype))  # e4m3 cannot be multiplied, as regimes do

    def _queries(self, keys: Iterable[torch.Tensor]) -> torch.Tensor:
        """[T, N, P + R] in the operands' dtype; many of them on the device, as keys are."""
        case = self.case
        q = self._normal(sum(case.q), case.heads, case.dimensions.qk_head_dim).float()
        causal = case.call != Call.CONTEXT_CHUNK

        def sites() -> Iterator[tuple[slice, Site]]:
            for rows, k in zip(segments(start_loc(case.q)), keys, strict=True):
                yield rows, Site(q[rows], k, case.softmax_scale, edges(k.shape[0], case), causal)

        return stored(self.queries_of(q, sites), self.dtype)

    def _call(
        self,
        chunk_idx: int | None,
        q: torch.Tensor,
        keys: ContextKeys,
        key_start_loc: tuple[int, ...],
        metadata: MLACommonPrefillMetadata,
        output_scale: torch.Tensor | None,
    ) -> PrefillCall:
        case = self.case
        q, k, v = (self.padded(x.to(self.device)) for x in (q, *keys))
        q, k, v = (lay_out(name, x, k, case) for name, x in (("q", q), ("k", k), ("v", v)))
        return PrefillCall(
            q=q,
            k=k,
            v=v,
            query_start_loc=start_loc(case.q),
            key_start_loc=key_start_loc,
            chunk_idx=chunk_idx,
            metadata=metadata,
            prepares=chunk_idx is None or case.call == Call.CONTEXT_CHUNK,
            lse=case.lse,
            out_dtype=torch.float8_e4m3fn if case.quant == "fp8" else output_dtype(self.dtype) if case.out else None,
            output_scale=output_scale,
        )


class _Prefill(RoleDefinition):
    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        """What configurations do not say is asked of the class by itself."""
        reasons = super().reasons(kernel, case, dtype, capability)
        if (case.lse or case.call != Call.NEW_TOKENS) and not getattr(kernel, "returns_lse", True):
            reasons.append(NO_LSE)
        if case.own_merge and not hasattr(kernel, "merge_attn_states"):
            reasons.append("no merge_attn_states of its own")
        if case.quant == "none":
            declared = getattr(kernel, "supports_unquantised_output", lambda dtype: True)
            if not yes_or_no(declared(dtype), "supports_unquantised_output"):
                reasons.append(f"unquantised output of {dtype} not declared")
        if case.quant == "fp8" and not reasons:
            try:
                key = fp8_static_tensor_sym()
            except ValueError as error:
                return [str(error)]
            if not self.kernel(kernel, case, dtype, torch.device("cpu")).supports_quant_output(key):
                reasons.append("fused e4m3 output not declared")
        return reasons


PREFILL = _Prefill(role=Role.PREFILL, batch=PrefillBatch, config=MLAPrefillSelectorConfig)
