"""The abstract compressor: key states and gate scores of tokens to entries, with states carried from call to call.

What vLLM calls ``DeepseekCompressor``, LMDeploy ``score_kv`` and ``fill_compress_state``, and what SGLang and vLLM do
for the pools of GLM-5.3's indexer. A compressor of ours checks each call before it launches: the refusals of SPEC 3.8
and 11.5, with expected and got.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf, PagedKernel, accepts_block_size
from mla_conformance.backends.kernel import expect, require_declared


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How a model compresses its keys."""

    head_dim: int  # D, columns of an entry
    rope_dim: int  # R, of which the last ones are rotated, neighbours together; 0 where none are
    ratio: int  # m, tokens that an entry stands for
    overlap: bool  # whether a group also takes the tokens of the one before
    norm: bool  # whether an entry passes through an RMSNorm before it is rotated
    eps: float  # of that norm

    @property
    def columns(self) -> int:
        """C · D, columns of a token's key state and of its scores."""
        return self.head_dim * (2 if self.overlap else 1)


@dataclass
class CompressMetadata:
    """A batch of T rows, of which the last may pad it, over B requests."""

    req_id_per_token: Tensor  # [T] int32, 0 of rows of padding
    positions: Tensor  # [T] int64 in the request's tokens
    query_start_loc: Tensor  # [B + 1] int32, without the rows of padding
    seq_lens: Tensor  # [B] int32, tokens of each request with those of this batch
    slot_mapping: Tensor  # [T] int64, of a group's last token the slot of its entry, block · page + offset; else -1
    block_table: Tensor  # [B, pages] int32, of the cache of entries; column c has the entries from c · page on
    state_slot_mapping: Tensor  # [T] int64, where a token's state may stand; -1 of rows of padding
    # [B, state pages] int32; column c has the tokens from c · state page on, if it has some of a group that is not
    # complete before this batch, or with overlap of the one before that; else anything
    state_block_table: Tensor


class MLACompressSelectorConfig(NamedTuple):
    """What a compressor is validated against; hashable."""

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
        """Whether keys may be compressed so."""
        return True

    @classmethod
    def _reasons(cls, config: MLACompressSelectorConfig) -> Iterator[str]:
        held = (
            (config.input_dtype in cls.supported_input_dtypes, f"states of {config.input_dtype}"),
            (cls.supports_compression(config.compression), f"{config.compression}"),
            (accepts_block_size(cls.get_supported_kernel_block_sizes(), config.block_size), "such pages of entries"),
            (accepts_block_size(cls.supported_state_block_sizes, config.state_block_size), "such pages of states"),
        )
        return (f"{what} not supported" for holds, what in held if not holds)

    def __init__(self, compression: Compression, vllm_config: Any) -> None:
        self.compression, self.vllm_config = compression, vllm_config

    def prepare_metadata(self, compress_metadata: CompressMetadata) -> None:
        """Take the batch of the next call; called once per batch, outside of any graph capture."""
        self._compress_metadata = compress_metadata

    @abstractmethod
    def run_compress(
        self,
        kv: Tensor,
        score: Tensor,
        ape: Tensor,
        norm_weight: Tensor,
        cos_sin_cache: Tensor,
        state_cache: Tensor,
        kv_cache: Tensor,
    ) -> None:
        """Write the entry of every group that a token of the batch completes, and keep the states of the others.

        Args:
            kv: [T, C · D] key states; rows may have any stride.
            score: [T, C · D] gate scores, the same.
            ape: [m, C · D] float32, what is added to the scores of each place in a group.
            norm_weight: [D] float32.
            cos_sin_cache: [P, R] float32, of each position the cosines of R/2 pairs, then their sines.
            state_cache: [blocks, state page, 2 · C · D] float32, what the backend left there and anything; the stride
                between blocks may exceed a packed block.
            kv_cache: [blocks, page, D] of the model's dtype, the same.
        """


def check_compress_call(
    backend: MLACompressBackend,
    metadata: CompressMetadata,
    states: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor,
    caches: tuple[Tensor, Tensor],
) -> None:
    """Refuse operands that do not fit, and what is not declared; reads no device memory.

    ``states`` are kv, score and ape, ``caches`` those of states and of entries.
    """
    how, (kv, score, ape), (state_cache, kv_cache) = backend.compression, states, caches
    rows = len(kv)
    expect("kv", kv, (rows, how.columns), kv.dtype)
    expect("score", score, (rows, how.columns), kv.dtype)
    expect("ape", ape, (how.ratio, how.columns), torch.float32)
    expect("norm_weight", norm_weight, (how.head_dim,), torch.float32)
    expect("req_id_per_token", metadata.req_id_per_token, (rows,), torch.int32)
    for name in ("positions", "slot_mapping", "state_slot_mapping"):
        expect(name, getattr(metadata, name), (rows,), torch.int64)
    expect("state_cache", state_cache, (*state_cache.shape[:2], 2 * how.columns), torch.float32)
    expect("kv_cache", kv_cache, (*kv_cache.shape[:2], how.head_dim), kv_cache.dtype)
    config = MLACompressSelectorConfig(kv_cache.dtype, kv.dtype, how, kv_cache.shape[1], state_cache.shape[1])
    require_declared(backend, kv.device, config)
