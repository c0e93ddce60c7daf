"""What the decode adapters of libraries that return no LSE have in common."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.decode import output_of
from mla_conformance.backends.paged import PagedDecodeBackend


class PagedOutputBackend(PagedDecodeBackend):
    """As :class:`PagedDecodeBackend`, without an LSE."""

    returns_lse: ClassVar[bool] = False

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        """See :class:`MLADecodeBackend`; the output alone."""
        return output_of(super().run_decode(ql_nope, q_pe, kv_cache, k_scale))

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`; the LSE is dropped."""
        output = self.outputs(ql_nope, q_pe, kv_cache, k_scale)
        return output, output.new_full((self.num_heads, len(output)), torch.nan, dtype=torch.float32)

    @abstractmethod
    def outputs(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        """Call the library; arguments as of :meth:`PagedDecodeBackend.attend`, which returns the output alone."""
