"""The common MLA layer (vLLM's ``MLACommonBackend``), composed of a prefill and a decode backend, and its state."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.decode import MLADecodeBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.layer import attention_layer, mla_batch, mla_impl
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata
from mla_conformance.reference.cache_layout import cache_dtype, entry_width

_LATENT, _ROPE = 512, 64


class MLACommonState:
    """The workspace for cached context, and buffers that keep their storage from a graph's capture to its replays."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model_config = runner.model_config
        self.chunked_prefill_enabled = runner.scheduler_config.chunked_prefill_enabled
        self.enable_prefix_caching = runner.cache_config.enable_prefix_caching
        self.context_chunk_workspace_size = mla_batch.workspace_tokens(runner)
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
        buffers = {"slot_mapping": attn_metadata.slot_mapping, "seq_lens_tensor": decode.seq_lens}
        buffers |= {"block_tables": decode.block_table, "seq_lens_cpu": decode.seq_lens_cpu}
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


class MLACommonBackend(attention_layer.AttentionBackend):
    accept_output_buffer = True
    prefill_backend: ClassVar[type[MLAPrefillBackend] | None] = None  # computes prefills; None if the layer has none
    decode_backend: ClassVar[type[MLADecodeBackend] | None] = None  # computes decodes; None if the layer has none
    impl_class: ClassVar[type[mla_impl.MLACommonImpl]] = mla_impl.MLACommonImpl  # computes
    builder_class: ClassVar[type[MLACommonMetadataBuilder]] = MLACommonMetadataBuilder  # builds the metadata
    vllm_config: ClassVar[Any] = None  # what the kernels' constructors receive
    tile_scales: ClassVar[str] = "float32"  # what the scales of an ``fp8_ds_mla`` entry are when it is written
    get_metadata_cls = staticmethod(lambda: MLACommonMetadata)
    get_state_cls = staticmethod(lambda: MLACommonState)
    is_mla = classmethod(lambda cls: True)

    @classmethod
    def get_name(cls) -> str:
        return "+".join(dict.fromkeys([kernel.get_name() for kernel in cls._kernels()])) or "MLA_COMMON"

    @classmethod
    def get_impl_cls(cls) -> type[mla_impl.MLACommonImpl]:
        return _bound(cls.impl_class, cls)

    @classmethod
    def get_builder_cls(cls) -> type[MLACommonMetadataBuilder]:
        return _bound(cls.builder_class, cls)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, page, entry]; an entry's elements are those of the cache's dtype."""
        if num_kv_heads != 1:
            raise ValueError(f"expected num_kv_heads 1, all heads share a latent, got {num_kv_heads}")
        return num_blocks, block_size, entry_width(layout_of(cache_dtype_str), *_latent_dims(head_size))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        source, target = src_kv_cache.view(torch.uint8), dst_kv_cache.view(torch.uint8)
        pairs = src_to_dst.long()
        target[pairs[:, 1].to(target.device)] = source[pairs[:, 0].to(source.device)].to(target.device)

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        for each in kv_caches:
            MLACommonBackend.swap_blocks(each, each, src_to_dists)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """L + R that the decode backend reads; that of DeepSeek's models for a layer without one."""
        if cls.decode_backend is None:
            return [576] if cls.prefill_backend is None else []
        return [latent + rope for latent, rope in cls.decode_backend.supported_latent_dims]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [MultipleOf(1)] if cls.decode_backend is None else cls.decode_backend.get_supported_kernel_block_sizes()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return all(kernel.supports_compute_capability(capability) for kernel in cls._kernels())

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        try:
            layout = layout_of(kv_cache_dtype or "auto")
            entry_width(layout, *_latent_dims(head_size))
            cache_dtype(layout, dtype)
        except ValueError as error:
            return str(error)
        missing = [reason for kernel in cls._kernels() for reason in kernel.missing_dependencies()]
        return f"required dependencies not available: {'; '.join(missing)}" if missing else None

    @classmethod
    def _kernels(cls) -> list[type[MLAPrefillBackend] | type[MLADecodeBackend]]:
        return [kernel for kernel in (cls.prefill_backend, cls.decode_backend) if kernel is not None]


def _latent_dims(head_size: int) -> tuple[int, int]:
    """L and R of an entry; only fp8_ds_mla asks, and only a rope of 64 will do for it, or none beside 512."""
    return (_LATENT, 0) if head_size == _LATENT else (head_size - _ROPE, _ROPE)


def mla_backend(
    prefill: type[MLAPrefillBackend] | None,  # computes prefills; None for a layer that only decodes
    decode: type[MLADecodeBackend] | None,  # computes decodes; None for a layer that only prefills
    base: type[MLACommonBackend] = MLACommonBackend,  # the layer's class, such as one with another ``impl_class``
) -> type[MLACommonBackend]:
    """The MLA layer of two kernels."""
    kernels = [kernel for kernel in (prefill, decode) if kernel is not None]
    if not kernels:
        raise ValueError("expected a prefill or a decode backend, got neither")
    layouts = ["auto", "fp8", "fp8_ds_mla"] if decode is None else decode.supported_kv_cache_dtypes
    dtypes = [dtype for dtype in kernels[0].supported_dtypes if kernels[-1].supports_dtype(dtype)]
    parts = {"__module__": base.__module__, "prefill_backend": prefill, "decode_backend": decode}
    declared = {"supported_dtypes": dtypes, "supported_kv_cache_dtypes": layouts}
    return type(base.__name__, (base,), {**parts, **declared})


@cache
def _bound(part: Any, backend: type[MLACommonBackend]) -> Any:
    known = {"attention_backend": backend, "__module__": part.__module__}
    return attention_layer.subclass_attention_backend_with_overrides("", part, known)
