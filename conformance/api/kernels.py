"""A kernel of each role around a plain function: the interface on one side, named inputs on the other.

What a function is called with stands here and nowhere else: cases hand out the same, and docs/python-api.md lists it.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.decode import MLADecodeBackend, output_of
from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse import MLASparseBackend

Function = Callable[..., Any]


class _AsksAnything:
    """A function declares nothing, so it is asked whatever the case asks.

    Attributes:
        function: takes the named inputs, gives the results.
    """

    function: ClassVar[Function]

    @staticmethod
    def get_name() -> str:
        """Name of the kernel."""
        return "function"

    @classmethod
    def validate_configuration(cls, device_capability: DeviceCapability | None, selector_config: Any) -> list[str]:
        """No reason against anything."""
        return []


def _given(**optional: Any) -> dict[str, Any]:
    """Those inputs that a case has."""
    return {name: value for name, value in optional.items() if value is not None}


def _ranks(metadata: Any) -> dict[str, Any]:
    """What is known of ranks that share the tokens; nothing on one rank."""
    names = ("dcp_world_size", "dcp_rank", "cp_kv_cache_interleave_size", "dcp_tot_seq_lens")
    shared = metadata.dcp_world_size > 1
    return _given(**{name: getattr(metadata, name, None) for name in names}) if shared else {}


class FunctionPrefill(_AsksAnything, MLAPrefillBackend):
    """A function of q, k and v."""

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Whatever a case asks."""
        return True

    # A call hands over by keyword what is optional.
    def run_prefill_new_tokens(  # type: ignore[override]
        self, q: Any, k: Any, v: Any, return_softmax_lse: bool, **further: Any
    ) -> Any:
        """Causal attention among new tokens."""
        metadata = self._prefill_metadata
        keys = {"cu_seqlens_k": metadata.query_start_loc, "max_seqlen_k": metadata.max_query_len, "causal": True}
        result = self._attend(q, k, v, **keys, **_given(**further))
        return result if return_softmax_lse else output_of(result)

    def run_prefill_context_chunk(self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Attention to a chunk of context, without a mask."""
        context = self._prefill_metadata.chunked_context
        assert context is not None, "a chunk is of a context"
        starts, longest = context.cu_seq_lens[chunk_idx], context.max_seq_lens[chunk_idx]
        return self._attend(q, k, v, cu_seqlens_k=starts, max_seqlen_k=longest, causal=False)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keys: Any) -> Any:
        metadata = self._prefill_metadata
        queries = {"cu_seqlens_q": metadata.query_start_loc, "max_seqlen_q": metadata.max_query_len}
        return self.function(q=q, k=k, v=v, scale=self.scale, **queries, **keys)


class FunctionDecode(_AsksAnything, MLADecodeBackend):
    """A function of absorbed queries and a paged cache."""

    def run_decode(
        self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> Any:
        """Attention of the queries, joined, to the cache."""
        metadata = self._decode_metadata
        q = torch.cat((ql_nope, q_pe), dim=-1)
        result = self.function(
            q=q,
            kv_cache=kv_cache,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            kv_cache_dtype=self.kv_cache_dtype,
            k_scale=k_scale,
            causal=True,
            **_ranks(metadata),
        )
        # What was written into q was written into an input, which the caller watches in its two parts.
        ql_nope.copy_(q[..., : self.kv_lora_rank])
        q_pe.copy_(q[..., self.kv_lora_rank :])
        return result


class FunctionSparse(_AsksAnything, MLASparseBackend):
    """A function of absorbed queries, keys and lists of them."""

    def run_sparse_decode(  # type: ignore[override]
        self, q: Any, kv_cache: Any, k_scale: Any, topk_indices: Any, return_softmax_lse: bool, **lists: Any
    ) -> Any:
        """Attention to entries of a paged cache."""
        cache = {"kv_cache": kv_cache, "kv_cache_dtype": self.kv_cache_dtype, "k_scale": k_scale}
        second = {"extra_kv_cache_dtype": self.extra_kv_cache_dtype}
        return self._attend(q, topk_indices, return_softmax_lse, **cache, **_given(**lists, **second))

    def run_sparse_prefill(  # type: ignore[override]
        self, q: Any, kv: Any, topk_indices: Any, return_softmax_lse: bool, **lists: Any
    ) -> Any:
        """Attention to gathered keys."""
        return self._attend(q, topk_indices, return_softmax_lse, kv=kv, **_given(**lists))

    def _attend(self, q: torch.Tensor, topk_indices: torch.Tensor, return_softmax_lse: bool, **further: Any) -> Any:
        metadata = self._sparse_metadata
        result = self.function(
            q=q,
            topk_indices=topk_indices,
            index_space=metadata.index_space.value,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            **_rows(metadata),
            **further,
            **_ranks(metadata),
        )
        return result if return_softmax_lse else output_of(result)


class FunctionIndexer(_AsksAnything, MLAIndexerBackend):
    """A function of an indexer's queries, weights and keys."""

    def run_index_logits(
        self, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None = None
    ) -> Any:
        """Scores."""
        return self._score(q, weights, k, k_scale)

    def run_index_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        topk_tokens: int,
        k_scale: torch.Tensor | None = None,
    ) -> Any:
        """The tokens with the best scores."""
        space = self._sparse_metadata.index_space.value
        return self._score(q, weights, k, k_scale, topk_tokens=topk_tokens, index_space=space)

    def _score(
        self, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None, **further: Any
    ) -> Any:
        return self.function(
            q=q,
            weights=weights,
            k=k,
            kv_cache_dtype=self.kv_cache_dtype,
            **_given(k_scale=k_scale),
            **_rows(self._sparse_metadata),
            **further,
        )


def _rows(metadata: Any) -> dict[str, Any]:
    """Which request a query token is of, and where the tokens of a request are."""
    return {
        "seq_lens": metadata.seq_lens,
        "cu_seqlens_q": metadata.query_start_loc,
        "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_seq_len,
        **_given(block_table=metadata.block_table, workspace_starts=metadata.workspace_starts),
    }


_KERNELS: dict[Role, type] = {
    Role.PREFILL: FunctionPrefill,
    Role.DECODE: FunctionDecode,
    Role.SPARSE: FunctionSparse,
    Role.INDEXER: FunctionIndexer,
}


def kernel_around(function: Function, role: Role, declaration: Declaration) -> Any:
    """A class of the role's interface whose calls go to ``function``."""
    parts = {"function": staticmethod(function), "declaration": declaration}
    return type(name_of(function), (_KERNELS[role],), parts)


def name_of(function: Function) -> str:
    """What messages call a function."""
    return str(getattr(function, "__name__", type(function).__name__))
