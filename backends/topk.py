"""The abstract top-k: of each row of given logits the columns with the largest."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import kernel
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.operands import Form, require_forms, table

_PER_ROW = Form("T", torch.int32, "one for each row")


@table
@dataclass
class TopKMetadata:
    """The windows of a batch's rows, which all layers of a step share."""

    lengths: Annotated[Tensor, _PER_ROW]  # columns that each row sees; 0 of rows of padding
    row_starts: Annotated[Tensor | None, _PER_ROW]  # the first of them; None where every row begins at column 0
    max_seq_len: int  # no length is larger
    # tokens that each row sees, where columns are pools; None where they are not
    token_lengths: Annotated[Tensor | None, _PER_ROW] = None


class MLATopKSelectorConfig(NamedTuple):
    dtype: torch.dtype  # of the logits
    topk_tokens: int  # K, columns that are selected for a row, or their tokens
    row_starts: bool  # whether windows begin elsewhere than at column 0
    pool: int = 1  # tokens that a column stands for


class MLATopKBackend(kernel.KernelBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # numbers of columns that are selected
    supports_row_starts: ClassVar[bool] = True  # whether a window may begin elsewhere than at column 0
    supports_pools: ClassVar[bool] = False  # whether it has ``run_pool_top_k_per_row``

    @classmethod
    def _reasons(cls, config: MLATopKSelectorConfig) -> Iterator[str]:
        columns, starts = config.topk_tokens // config.pool, "rows that start elsewhere than at column 0"
        return kernel.unless(
            (kernel.accepts_block_size(cls.supported_topk, columns), f"topk {columns} not supported"),
            (cls.supports_row_starts or not config.row_starts, f"{starts} not supported"),
            (cls.supports_pools or config.pool == 1, "columns of several tokens not supported"),
        )

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def prepare_metadata(self, topk_metadata: TopKMetadata) -> None:
        self._topk_metadata = topk_metadata

    @abstractmethod
    @table
    def run_top_k_per_row(self, logits: Annotated[Tensor, Form("T, C")], topk_tokens: int) -> Tensor:
        """[T, K] int32: the columns of each row's window with the largest logits, at most K, none twice, -1 behind.

        They count from the row's start; ``Declaration.selection`` says what differs. Outside of a window is anything.
        """

    @table
    def run_pool_top_k_per_row(
        self, logits: Annotated[Tensor, Form("T, C")], topk_tokens: int, pool: int, tail: bool
    ) -> Tensor:
        """[T, K] int32 in any order, -1 between: each token of the pools with the largest logits.

        Logits have a column for each whole pool; pool p has the tokens from p · pool on. With a ``tail`` the tokens of
        the last, incomplete pool of each row are named besides, in [T, K + pool - 1].
        """
        raise kernel.UnsupportedConfiguration(f"{self.get_name()}: columns of several tokens not supported")


def check_topk_call(
    backend: MLATopKBackend, metadata: TopKMetadata, logits: Tensor, topk_tokens: int, pool: int = 1
) -> None:
    """Refuse operands that do not fit, and what is not declared; reads no device memory."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        got = f"{list(logits.shape)} of strides {list(logits.stride())}"
        raise ValueError(f"logits: expected [T, C] with neighbouring columns, got {got}")
    require_forms(TopKMetadata, vars(metadata), {"T": len(logits)})
    if metadata.max_seq_len > logits.shape[1]:
        raise ValueError(f"max_seq_len: expected at most the {logits.shape[1]} columns, got {metadata.max_seq_len}")
    if topk_tokens < 1 or topk_tokens % pool:
        of_pools = f", a multiple of {pool}" if pool > 1 else ""
        raise ValueError(f"topk_tokens: expected a positive number{of_pools}, got {topk_tokens}")
    if (pool > 1) != (metadata.token_lengths is not None):
        raise ValueError(f"token_lengths: expected them where columns are pools of several tokens, got pool {pool}")
    asked = {"topk_tokens": topk_tokens, "row_starts": metadata.row_starts is not None, "pool": pool}
    kernel.require_declared(backend, logits.device, MLATopKSelectorConfig, dtype=logits.dtype, **asked)
