"""The abstract MLA decode backend: absorbed queries against paged latents, one row of L + R a token for all heads."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, declaration, kernel, operands


@operands.table
@dataclass
class MLACommonDecodeMetadata:
    """What a decode backend may know of the batch; B requests, T query tokens, requests end to end.

    A row of padding is a request of one query token, ``seq_lens`` 0 and blocks -1: it sees no key.
    """

    # on the device; entries past a request's last page may hold anything
    block_table: Annotated[Tensor, operands.Form("B, max blocks", torch.int32)]
    # on the device; cached tokens of each request on this rank, its new tokens included
    seq_lens: Annotated[Tensor, operands.Form("B", torch.int32)]
    query_start_loc: Annotated[Tensor, operands.Form("B + 1", torch.int32)]  # on the device
    max_query_len: int  # longest query in tokens; may exceed the true one
    max_seq_len: int  # longest sequence in tokens; may exceed the true one
    query_lens_cpu: Annotated[Tensor, operands.Form("B", torch.int32)]  # on the CPU
    seq_lens_cpu: Annotated[Tensor, operands.Form("B", torch.int32)]  # on the CPU
    dcp_world_size: int = 1  # ranks that share the sequences' tokens
    dcp_rank: int = 0  # this rank
    cp_kv_cache_interleave_size: int = 1  # token t belongs to rank (t // this) % dcp_world_size
    # on the device; tokens on all ranks, which the causal bound refers to. None on one rank
    dcp_tot_seq_lens: Annotated[Tensor | None, operands.Form("B", torch.int32)] = None


class MLADecodeSelectorConfig(NamedTuple):
    dtype: torch.dtype  # of the absorbed query, the rotated query and the output
    kv_cache_dtype: str  # ``auto`` (the model's dtype), ``fp8`` or ``fp8_ds_mla``, or another name of one of these
    block_size: int  # tokens of a page
    kv_lora_rank: int  # L
    qk_rope_head_dim: int  # R
    max_query_len: int = 1  # most query tokens of a request
    uniform: bool = True  # whether all requests have that many
    dcp_world_size: int = 1  # ranks that share a sequence
    tile_scales: str = "float32"  # scales of an ``fp8_ds_mla`` cache: ``float32`` numbers, or ``pow2``, powers of two
    lse: bool = True  # whether the LSE is asked for


class LatentDecode(cache_dtypes.LatentKernel):
    """Attention of the last tokens of each request to its cached latents, whatever of these tokens they see."""

    supported_query_len: ClassVar[int | None] = 1  # most query tokens of a request; None means any number
    supports_nonuniform_queries: ClassVar[bool] = False  # whether requests may have different numbers of query tokens
    supports_causal_dcp: ClassVar[bool] = False  # whether several query tokens are masked right on one of several ranks

    @classmethod
    def _reasons(cls, config: MLADecodeSelectorConfig) -> Iterator[str]:
        yield from cls._cache_reasons(config)
        yield from cls._latent_reasons(config)
        if cls.supported_query_len is not None and config.max_query_len > cls.supported_query_len:
            yield f"{config.max_query_len} query tokens a request not supported"
        if not config.uniform and not cls.supports_nonuniform_queries:
            yield "requests with different numbers of query tokens not supported"
        if config.dcp_world_size > 1 and config.max_query_len > 1 and not cls.supports_causal_dcp:
            yield "several query tokens a request not supported under decode context parallelism"
        if config.lse and not cls.returns_lse:
            yield declaration.NO_LSE

    _check: ClassVar[Callable[..., None]]  # refuses operands

    def prepare_metadata(self, decode_metadata: MLACommonDecodeMetadata) -> None:
        """Take the metadata of the next calls; called once per batch, outside of any graph capture."""
        self._decode_metadata = decode_metadata


def check_decode_operands(
    backend: LatentDecode, metadata: MLACommonDecodeMetadata, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor
) -> None:
    """Refuse operands that are not declared or contradict the metadata; reads no device memory."""
    query_lens, page = metadata.query_lens_cpu.tolist(), kv_cache.shape[1]
    kernel.require_declared(
        backend,
        ql_nope.device,
        MLADecodeSelectorConfig,
        dtype=ql_nope.dtype,
        block_size=page,
        max_query_len=max(query_lens),
        uniform=len(set(query_lens) - {0}) <= 1,  # requests without a query pad a graph's batch
        dcp_world_size=metadata.dcp_world_size,
        lse=metadata.dcp_world_size > 1,
    )
    known = {"T": sum(query_lens), "N": backend.num_heads, "L": backend.kv_lora_rank, "R": backend.qk_rope_head_dim}
    operands.require_forms(MLADecodeBackend.run_decode, (ql_nope, q_pe), known)
    cache_dtypes.check_cache("kv_cache", kv_cache, backend.kv_cache_dtype, backend, ql_nope.dtype)
    longest, pages = max(metadata.seq_lens_cpu.tolist()), metadata.block_table.shape[1]
    if pages * page < longest:
        needs = f"a sequence of {longest} tokens has {-(-longest // page)} pages of {page}"
        raise ValueError(f"block_table: {needs}, its row holds {pages}")


class MLADecodeBackend(LatentDecode):
    """Decode attention over a paged cache of latents: T query tokens, N heads on this rank, L and R."""

    _check = staticmethod(check_decode_operands)

    @abstractmethod
    @operands.table
    def run_decode(
        self,
        ql_nope: Annotated[Tensor, operands.Form("T or more, N, L")],
        q_pe: Annotated[Tensor, operands.Form("T or more, N, R")],
        kv_cache: Annotated[Tensor, operands.Form("blocks, page, width")],
        k_scale: Annotated[Tensor, operands.Form("", torch.float32)],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of each request's query tokens to its cached tokens, aligned bottom-right.

        ``ql_nope`` is the query after absorption of W_UK, ``q_pe`` rotated, both of any strides. The cache is [blocks,
        page, L + R] of the model's dtype (``auto``) or of e4m3 (``fp8``), whose code 1.0 stands for ``k_scale``, or
        [blocks, page, 656] uint8 (``fp8_ds_mla``); the stride between blocks may exceed a packed block. Returns output
        [T, N, L] of the query's dtype and lse [N, T] float32, natural logarithm, 0 and -inf in a row without keys; the
        output alone where the class declares that it returns no LSE.
        """


def output_of(result: Any) -> Any:
    """The output of what ``run_decode`` returned, whether an LSE stands beside it or not."""
    return result[0] if isinstance(result, (tuple, list)) and len(result) == 2 else result


def positions_of(metadata: MLACommonDecodeMetadata, local: Tensor) -> Tensor:
    """Positions in whole sequences of tokens by their numbers among those that this rank holds."""
    interleave = metadata.cp_kv_cache_interleave_size
    shares = local // interleave * metadata.dcp_world_size + metadata.dcp_rank
    return shares * interleave + local % interleave
