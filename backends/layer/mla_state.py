"""What an MLA layer keeps between batches (vLLM's ``MLACommonState``): its workspace and the buffers of its graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from mla_conformance.backends.layer.layer_config import workspace_tokens
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata


class MLACommonState:
    """The workspace for cached context, and buffers that keep their storage from a graph's capture to its replays."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model_config = runner.model_config
        self.chunked_prefill_enabled = runner.scheduler_config.chunked_prefill_enabled
        self.enable_prefix_caching = runner.cache_config.enable_prefix_caching
        self.context_chunk_workspace_size = workspace_tokens(runner)
        self.context_chunk_workspace: Tensor | None = None
        self._is_graph_capturing = False

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        device = self.runner.device
        self._graph_slot_mapping = torch.full((max_batch_size,), -1, dtype=torch.int64, device=device)
        self._graph_seq_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._graph_starts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._graph_block_tables = torch.tensor(self.runner.graph_block_tables, dtype=torch.int32, device=device)
        self._is_graph_capturing = True
        try:
            yield
        finally:
            self._is_graph_capturing = False
            del self._graph_slot_mapping, self._graph_seq_lens, self._graph_starts, self._graph_block_tables

    def graph_clone(self, batch_size: int) -> Self:
        self._require_capture()
        return type(self)(self.runner)

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> MLACommonMetadata:
        """Metadata over the buffers: decodes of one token, the first cached one."""
        _require_decoder_only(is_encoder_decoder_model)
        self._require_capture()
        held = min(len(self._graph_slot_mapping), len(self._graph_block_tables))
        if not 0 < batch_size <= held:
            raise ValueError(f"expected a batch of 1..{held} requests, the captured buffers', got {batch_size}")
        starts = self._graph_starts[: batch_size + 1]
        return MLACommonMetadata(
            num_decodes=batch_size,
            num_decode_tokens=batch_size,
            slot_mapping=self._graph_slot_mapping[:batch_size],
            seq_lens=[1] * batch_size,
            seq_lens_tensor=self._graph_seq_lens[:batch_size],
            query_start_loc=starts,
            query_lens_cpu=torch.ones(batch_size, dtype=torch.int32),
            seq_start_loc=starts,
            context_lens_tensor=torch.zeros_like(self._graph_seq_lens[:batch_size]),
            block_tables=self._graph_block_tables[:batch_size],
            max_decode_seq_len=self.runner.max_seq_len_to_capture,
            dtype=self.model_config.dtype,
            use_cuda_graph=True,
            head_dim=self.model_config.get_head_size(),
        )

    def get_graph_input_buffers(
        self, attn_metadata: MLACommonMetadata, is_encoder_decoder_model: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of a captured batch that a replay fills, by name; ``seq_lens_cpu`` is on the host."""
        _require_decoder_only(is_encoder_decoder_model)
        decode = attn_metadata.decode_metadata
        assert decode is not None
        buffers = {
            "slot_mapping": attn_metadata.slot_mapping,
            "seq_lens_tensor": decode.seq_lens,
            "block_tables": decode.block_table,
            "seq_lens_cpu": decode.seq_lens_cpu,
        }
        return buffers if decode.dcp_tot_seq_lens is None else buffers | {"dcp_tot_seq_lens": decode.dcp_tot_seq_lens}

    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Tensor], attn_metadata: MLACommonMetadata, is_encoder_decoder_model: bool = False
    ) -> None:
        """Fill the buffers of a captured batch with another one of decodes, if it fits; other rows become padding."""
        _require_decoder_only(is_encoder_decoder_model)
        new = self.get_graph_input_buffers(attn_metadata) if attn_metadata.num_decodes else {}
        captured = input_buffers["slot_mapping"].shape[0]
        if attn_metadata.num_prefills or not new or new["slot_mapping"].shape[0] > captured:
            raise ValueError(
                f"expected a batch of up to {captured} decode tokens, as captured, got {attn_metadata.num_prefills} "
                f"prefills and {attn_metadata.num_decode_tokens} decode tokens; run it without the graph"
            )
        longest, most = int(new["seq_lens_cpu"].max()), self.runner.max_seq_len_to_capture
        if longest > most:
            raise ValueError(
                f"expected sequences of up to {most} tokens, as captured, got {longest}; run it without the graph"
            )
        for name, buffer in input_buffers.items():
            buffer.fill_(-1 if name in ("slot_mapping", "block_tables") else 0)
            # Columns that do not fit hold blocks for tokens to come.
            sizes = zip(buffer.shape, new[name].shape, strict=True)
            corner = tuple(slice(0, min(held, given)) for held, given in sizes)
            buffer[corner].copy_(new[name][corner])

    def begin_forward(self, model_input: Any) -> None:
        """Bind the workspace, allocated at the first call where the ``input_tokens`` lie, to the ``attn_metadata``."""
        if not self.context_chunk_workspace_size:
            return
        if self.context_chunk_workspace is None:
            self.context_chunk_workspace = torch.empty(
                (self.context_chunk_workspace_size, self.model_config.get_head_size()),
                dtype=self.model_config.dtype,
                device=model_input.input_tokens.device,
            )
        model_input.attn_metadata.bind_workspace(self.context_chunk_workspace)

    def _require_capture(self) -> None:
        if not self._is_graph_capturing:
            raise ValueError("graph buffers exist inside of `with state.graph_capture(max_batch_size)` only")


def _require_decoder_only(is_encoder_decoder_model: bool) -> None:
    if is_encoder_decoder_model:
        raise NotImplementedError("an MLA layer does not serve encoder-decoder models")
