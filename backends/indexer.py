"""The abstract MLA indexer: a score for each cached token of a query token's request, and the best of them.

Its metadata is that of the attention that follows, whose index space says what the selected numbers count.
Sources: vLLM's ``sparse_attn_indexer``, DeepGEMM's ``fp8_fp4_mqa_logits`` and ``fp8_fp4_paged_mqa_logits``.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import kernel, roles, sparse
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.operands import Form, require_forms, table
from mla_conformance.reference.cache_layout import entry_width

Queries = Annotated[Tensor, Form("T, H, D", "codes")]
Weights = Annotated[Tensor, Form("T, H", torch.float32)]
Keys = Annotated[Tensor, Form("blocks, page, width", "entries")]
KeyScales = Annotated[Tensor | None, Form("S", torch.float32)]


class MLAIndexerSelectorConfig(NamedTuple):
    call: str  # ``logits`` or ``topk``
    paged: bool  # whether the keys lie in a paged cache, or gathered
    dtype: torch.dtype  # of the model
    kv_cache_dtype: str  # one of :data:`roles.INDEX_LAYOUTS`
    block_size: int  # tokens of a page; 1 of gathered keys
    num_heads: int  # H, the indexer's heads
    head_dim: int  # D
    topk_tokens: int  # K, tokens that are selected for a query token
    index_space: str = roles.IndexSpace.POSITION  # what the selected numbers count


class MLAIndexerBackend(kernel.PagedKernel):
    """Scores of cached tokens, and the best: T query tokens, H heads of D columns, K ``topk_tokens``."""

    supported_calls: ClassVar[list[str]] = ["logits", "topk"]  # ``logits``, ``topk`` or both; the other one is refused
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8_index"]  # those of `roles.INDEX_LAYOUTS` that it reads
    supported_heads: ClassVar[list[int]] = []  # numbers of heads; empty means any
    supported_head_dims: ClassVar[list[int]] = []  # columns of a key; empty means any
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # numbers of tokens that are selected
    supported_index_spaces: ClassVar[list[str]] = [roles.IndexSpace.POSITION]  # what the selected numbers may count

    @classmethod
    def _reasons(cls, config: MLAIndexerSelectorConfig) -> Iterator[str]:
        heads, dims, spaces = cls.supported_heads, cls.supported_head_dims, cls.supported_index_spaces
        head_dim, layout, selects = config.head_dim, config.kv_cache_dtype, config.call == "topk"
        pages, page = cls.get_supported_kernel_block_sizes(), config.block_size
        topk = kernel.accepts_block_size(cls.supported_topk, config.topk_tokens)
        counted = f"that count by {config.index_space} not supported (supported: {', '.join(spaces)})"
        return kernel.unless(
            (layout in cls.supported_kv_cache_dtypes, f"kv_cache_dtype {layout} not supported"),
            (not heads or config.num_heads in heads, f"{config.num_heads} heads not supported (supported: {heads})"),
            (not dims or head_dim in dims, f"head dim {head_dim} not supported (supported: {dims})"),
            (not config.paged or kernel.accepts_block_size(pages, page), f"block_size {page} not supported"),
            (config.call in cls.supported_calls, f"{config.call} not supported"),
            (not selects or topk, f"topk {config.topk_tokens} not supported"),
            (not selects or config.index_space in spaces, f"selected tokens {counted}"),
        )

    def __init__(self, num_heads: int, head_dim: int, kv_cache_dtype: str, vllm_config: Any) -> None:
        kernel.expect_one("kv_cache_dtype", kv_cache_dtype, roles.INDEX_LAYOUTS)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.kv_cache_dtype, self.vllm_config = kv_cache_dtype, vllm_config

    def prepare_metadata(self, sparse_metadata: sparse.MLASparseMetadata) -> None:
        self._sparse_metadata = sparse_metadata

    @abstractmethod
    @table
    def run_index_logits(self, q: Queries, weights: Weights, k: Keys, k_scale: KeyScales = None) -> Tensor:
        """Σ_h weights[t, h] · relu(q[t, h] · k[s]) for the tokens s of each query token's request up to its own.

        q is of the model's dtype (``auto``) or e4m3, of any strides; weights hold the softmax scale and the scales of
        queries in codes. k is a paged cache, which the metadata has a block table for: [blocks, page, D] of the model's
        dtype, or [blocks, page, D + 4] uint8, whose pages hold the codes of all their tokens and behind them a float32
        scale for each, blocks any stride apart; or gathered keys [S, D] of the query's dtype, with k_scale if they are
        codes. Returns [T, the metadata's max_seq_len] float32, at column s the score of token s, and anything behind a
        row's own.
        """

    @abstractmethod
    @table
    def run_index_topk(
        self, q: Queries, weights: Weights, k: Keys, topk_tokens: int, k_scale: KeyScales = None
    ) -> Tensor:
        """[T, ``topk_tokens``] int32, the tokens with the largest scores in any order, none twice, -1 of none."""


def bounds_of(metadata: sparse.MLASparseMetadata) -> Tensor:
    """[T] int32, on the device: tokens that each query token sees, those of its request up to its own."""
    request = metadata.req_id_per_token.long()
    rows = torch.arange(len(request), dtype=torch.int32, device=request.device)
    return (metadata.seq_lens[request] - metadata.query_start_loc[request + 1] + rows + 1).clamp(min=0)


def check_index_call(
    backend: MLAIndexerBackend, operands: tuple[Tensor, Tensor, Tensor, Tensor | None], call: str, topk_tokens: int = 1
) -> None:
    """Refuse operands (q, weights, k, k_scale) that do not fit ``logits`` or ``topk``, and what is not declared."""
    (q, weights, k, k_scale), metadata = operands, backend._sparse_metadata
    paged, codes, entry = metadata.block_table is not None, backend.kv_cache_dtype != "auto", MLAIndexerBackend
    known: dict[str, Any] = {"T": int(metadata.query_lens_cpu.sum()), "H": backend.num_heads, "D": backend.head_dim}
    known |= {"S": len(k), "width": entry_width(backend.kv_cache_dtype, backend.head_dim, 0)}
    known |= {"codes": torch.float8_e4m3fn} if codes else {}
    known["entries"] = torch.uint8 if codes else q.dtype
    require_forms(entry.run_index_logits, (q, weights, k if paged else None), known)
    if not paged:
        require_forms({"k": Form("S, D", q.dtype)}, {"k": k}, known)
    if (k_scale is not None) != (codes and not paged):
        want = "the scales of gathered codes" if k_scale is None else "None, since no gathered codes were given"
        raise ValueError(f"k_scale: expected {want}, got {None if k_scale is None else list(k_scale.shape)}")
    require_forms(entry.run_index_logits, (None, None, None, k_scale), known)
    if topk_tokens < 1:
        raise ValueError(f"topk_tokens: expected a positive number, got {topk_tokens}")
    asked = {"call": call, "paged": paged, "topk_tokens": topk_tokens, "index_space": metadata.index_space}
    asked |= {"dtype": torch.bfloat16 if codes else q.dtype, "block_size": k.shape[1] if paged else 1}
    kernel.require_declared(backend, q.device, MLAIndexerSelectorConfig, **asked)
