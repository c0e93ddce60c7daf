"""What the classes of the attention-layer interface share (vLLM's ``v1.attention.backend``): types, and a batch."""

import warnings
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from mla_conformance.backends.cache_dtypes import layout_of


class AttentionType(StrEnum):
    """Which tokens attend to which; a string, so that it can be compared with one."""

    DECODER = "decoder"
    """Causal attention among the tokens of a decoder."""
    ENCODER = "encoder"
    """Attention among the encoder's tokens of an encoder-decoder model."""
    ENCODER_ONLY = "encoder_only"
    """Attention among the tokens of a model without a decoder."""
    ENCODER_DECODER = "encoder_decoder"
    """The decoder's queries to the encoder's keys."""


class AttentionMetadata:
    """Base of what a builder tells a layer of a batch."""


class AttentionLayer(Protocol):
    """The layer on whose behalf an ``AttentionImpl`` computes: it holds the scales of quantised operands.

    Scales are float32 scalar tensors, the value that code 1.0 stands for; the floats are the same on the host.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: Tensor

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """Attention of ``query`` to the cache after ``key`` and ``value`` were written to it."""
        ...


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether the cache holds codes rather than values of the model's dtype."""
    return layout_of(kv_cache_dtype) != "auto"


@dataclass
class CommonAttentionMetadata:
    """A batch, before a backend's builder makes its own metadata of it; B requests, T tokens."""

    query_start_loc: Tensor  # [B + 1] int32, on the device; where each request's tokens start
    query_start_loc_cpu: Tensor  # the same on the host
    seq_lens: Tensor  # [B] int32, on the device; computed and new tokens of each request
    num_reqs: int  # B; may count padding
    num_actual_tokens: int  # T; may count padding
    max_query_len: int  # longest query in tokens
    max_seq_len: int  # longest sequence in tokens; may exceed the true one
    block_table_tensor: Tensor  # [B, max blocks] int32, on the device
    slot_mapping: Tensor  # [T] int64, on the device; -1 for a token that is not stored
    causal: bool = True  # whether a token attends to no later one
    logits_indices_padded: Tensor | None = None  # for layers that prefill only what the logits need
    num_logits_indices: int | None = None  # how many of these count
    encoder_seq_lens: Tensor | None = None  # [B], for cross attention
    encoder_seq_lens_cpu: Any | None = None  # the same on the host, a numpy array
    dcp_local_seq_lens: Tensor | None = None  # [B] int32, on the device; tokens of each sequence on this rank
    dcp_local_seq_lens_cpu: Tensor | None = None  # the same on the host
    _seq_lens_cpu: Tensor | None = None
    _num_computed_tokens_cpu: Tensor | None = None
    _num_computed_tokens_cache: Tensor | None = None

    @property
    def seq_lens_cpu(self) -> Tensor:
        """Deprecated: ``seq_lens`` on the host."""
        _warn("seq_lens_cpu", "seq_lens.cpu()")
        return self.host_seq_lens()

    @property
    def num_computed_tokens_cpu(self) -> Tensor:
        """Deprecated: [B] tokens computed before this batch, on the host."""
        _warn("num_computed_tokens_cpu", "query_start_loc_cpu and seq_lens")
        if self._num_computed_tokens_cpu is None:
            self._num_computed_tokens_cpu = self.host_seq_lens() - self.query_start_loc_cpu.diff()
        return self._num_computed_tokens_cpu

    def host_seq_lens(self) -> Tensor:
        """``seq_lens`` on the host, copied from the device if whoever made the batch left none; then it waits."""
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.cpu()
        return self._seq_lens_cpu

    def compute_num_computed_tokens(self) -> Tensor:
        """[B] tokens computed before this batch, on the device; nothing is copied to the host."""
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.query_start_loc.diff()
        return self._num_computed_tokens_cache

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> "CommonAttentionMetadata":
        """The batch's first requests and tokens alone; the tensors are views."""

        def rows(x: Any | None) -> Any:
            return None if x is None else x[:num_actual_reqs]

        return replace(
            self,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            seq_lens=rows(self.seq_lens),
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            block_table_tensor=rows(self.block_table_tensor),
            slot_mapping=self.slot_mapping[:num_actual_tokens],
            encoder_seq_lens=rows(self.encoder_seq_lens),
            encoder_seq_lens_cpu=rows(self.encoder_seq_lens_cpu),
            dcp_local_seq_lens=rows(self.dcp_local_seq_lens),
            dcp_local_seq_lens_cpu=rows(self.dcp_local_seq_lens_cpu),
            _seq_lens_cpu=rows(self._seq_lens_cpu),
            _num_computed_tokens_cpu=rows(self._num_computed_tokens_cpu),
            _num_computed_tokens_cache=None,
        )


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated: it may wait for the device; use {instead}", DeprecationWarning, stacklevel=3)
