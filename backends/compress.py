"""The abstract compressor: key states and scores of tokens to entries, with states carried from call to call."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.kernel import PagedKernel, accepts_block_size, require_declared, unless
from mla_conformance.backends.operands import Form, require_forms, table


@dataclass(frozen=True, kw_only=True)
class Compression:
    head_dim: int  # D, columns of an entry
    rope_dim: int  # R, of which the last ones are rotated, neighbours together; 0 where none are
    ratio: int  # m, tokens that an entry stands for
    overlap: bool  # whether a group also takes the tokens of the one before
    norm: bool  # whether an entry passes through an RMSNorm before it is rotated
    eps: float  # of that norm

    def __str__(self) -> str:
        groups, norm = "overlapping " * self.overlap, "" if self.norm else ", as they are"
        return f"{groups}groups of {self.ratio}, {self.head_dim} columns, {self.rope_dim} of them rotated{norm}"

    @property
    def columns(self) -> int:
        """C · D, columns of a token's key state and of its scores."""
        return self.head_dim * (2 if self.overlap else 1)


@table
@dataclass
class CompressMetadata:
    """A batch of T rows, of which the last may pad it, over B requests."""

    req_id_per_token: Annotated[Tensor, Form("T", torch.int32)]  # 0 of rows of padding
    positions: Annotated[Tensor, Form("T", torch.int64)]  # in the request's tokens
    query_start_loc: Annotated[Tensor, Form("B + 1")]  # int32, without the rows of padding
    seq_lens: Annotated[Tensor, Form("B")]  # int32, tokens of each request with those of this batch
    # of a group's last token the slot of its entry, block · page + offset; else -1
    slot_mapping: Annotated[Tensor, Form("T", torch.int64)]
    block_table: Annotated[Tensor, Form("B, pages")]  # int32, of entries; column c has those from c · page on
    state_slot_mapping: Annotated[Tensor, Form("T", torch.int64)]  # where a token's state may stand; -1 of padding
    # int32; column c has the tokens from c · state page on, if it has some of a group that is not complete before this
    # batch, or with overlap of the one before that; else anything
    state_block_table: Annotated[Tensor, Form("B, state pages")]


class MLACompressSelectorConfig(NamedTuple):
    dtype: torch.dtype  # of the entries
    input_dtype: torch.dtype  # of key states and scores
    compression: Compression  # conventions of the model
    block_size: int  # entries of a page
    state_block_size: int  # tokens of a page of states


class MLACompressBackend(PagedKernel):
    """Compresses keys; the pages of ``supported_block_sizes`` are those of entries."""

    supported_input_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]  # of key states and scores
    supported_state_block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # tokens of a page of states

    @classmethod
    def supports_compression(cls, compression: Compression) -> bool:
        return True

    @classmethod
    def _reasons(cls, config: MLACompressSelectorConfig) -> Iterator[str]:
        pages, states = cls.get_supported_kernel_block_sizes(), cls.supported_state_block_sizes
        return unless(
            (config.input_dtype in cls.supported_input_dtypes, f"states of {config.input_dtype} not supported"),
            (cls.supports_compression(config.compression), f"{config.compression} not supported"),
            (accepts_block_size(pages, config.block_size), "such pages of entries not supported"),
            (accepts_block_size(states, config.state_block_size), "such pages of states not supported"),
        )

    def __init__(self, compression: Compression, vllm_config: Any) -> None:
        self.compression, self.vllm_config = compression, vllm_config

    def prepare_metadata(self, compress_metadata: CompressMetadata) -> None:
        self._compress_metadata = compress_metadata

    @abstractmethod
    @table
    def run_compress(
        self,
        kv: Annotated[Tensor, Form("T, C · D", "input")],  # key states; rows may have any stride
        score: Annotated[Tensor, Form("T, C · D", "input")],  # gate scores, the same
        ape: Annotated[Tensor, Form("m, C · D", torch.float32)],  # what is added to the scores of each place in a group
        norm_weight: Annotated[Tensor, Form("D", torch.float32)],
        cos_sin_cache: Annotated[Tensor, Form("P, R")],  # float32, of each position cosines of R/2 pairs, then sines
        # what the backend left there and anything; the stride between blocks may exceed a packed block
        state_cache: Annotated[Tensor, Form("blocks, state page, 2 · C · D", torch.float32, written=True)],
        kv_cache: Annotated[Tensor, Form("blocks, page, D", written=True)],  # of the model's dtype, the same
    ) -> None:
        """Write the entry of every group that a token of the batch completes, and keep the states of the others."""


def check_compress_call(backend: MLACompressBackend, metadata: CompressMetadata, x: Any) -> None:
    """Refuse what ``run_compress`` was given that does not fit, and what is not declared."""
    how, given = backend.compression, vars(x) | {"cos_sin_cache": None}
    known = {"T": len(x.kv), "m": how.ratio, "D": how.head_dim, "C · D": how.columns, "2 · C · D": 2 * how.columns}
    require_forms(MLACompressBackend.run_compress, given, {**known, "input": x.kv.dtype})
    require_forms(CompressMetadata, vars(metadata), known)
    asked = {"block_size": x.kv_cache.shape[1], "state_block_size": x.state_cache.shape[1], "input_dtype": x.kv.dtype}
    require_declared(backend, x.kv.device, MLACompressSelectorConfig, dtype=x.kv_cache.dtype, **asked)
