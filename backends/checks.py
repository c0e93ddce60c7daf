"""What a backend of ours checks before it launches: the refusals of SPEC 3.8, with expected and got."""

from torch import Tensor

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, MLADecodeSelectorConfig
from mla_conformance.backends.interface import PrefillKernelBackend, UnsupportedConfiguration
from mla_conformance.backends.kernel import require_declared
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.backends.sparse_checks import check_cache


def check_operands(
    backend: PrefillKernelBackend, q: Tensor, k: Tensor, v: Tensor, query_tokens: int, key_tokens: int
) -> None:
    """Refuse operands that the backend does not declare or that contradict the metadata.

    Args:
        backend: the instance that is called.
        q: [T, N, P + R].
        k: [S, N, P + R].
        v: [S, N, V].
        query_tokens: rows of q that the metadata counts.
        key_tokens: rows of k and v that the metadata counts.

    Raises:
        UnsupportedConfiguration: a dtype or head dims outside the declaration.
        ValueError: shapes or lengths that do not fit the metadata.
    """
    _check_declared(backend, q, k, v)
    head_dim = backend.qk_nope_head_dim + backend.qk_rope_head_dim
    for name, tensor, tokens, width in (
        ("q", q, query_tokens, head_dim),
        ("k", k, key_tokens, head_dim),
        ("v", v, key_tokens, backend.v_head_dim),
    ):
        _check_rows(name, tensor, tokens, backend.num_heads, width)


def _check_rows(name: str, x: Tensor, tokens: int, *shape: int) -> None:
    if x.shape[1:] != shape or x.shape[0] < tokens:
        expected = f"at least {tokens} tokens of {list(shape)} by the metadata"
        raise ValueError(f"{name}: expected {expected}, got shape {list(x.shape)}")


def _check_declared(backend: PrefillKernelBackend, *operands: Tensor) -> None:
    for dtype in {operand.dtype for operand in operands}:
        if not backend.supports_dtype(dtype):
            supported = ", ".join(map(str, backend.supported_dtypes))
            raise UnsupportedConfiguration(
                f"{backend.get_name()}: dtype {dtype} not supported (supported: {supported})"
            )
    if not backend.supports_mla_dimensions(backend.dimensions):
        raise UnsupportedConfiguration(f"{backend.get_name()}: MLA dimensions {backend.dimensions} not supported")


def check_unquantised(backend: PrefillKernelBackend, output_scale: Tensor | None) -> None:
    """Refuse a quantised output in a backend that has none.

    Raises:
        UnsupportedConfiguration: an output scale was given.
    """
    if output_scale is not None and not backend.supports_quant_output(fp8_static_tensor_sym()):
        raise UnsupportedConfiguration(
            f"{backend.get_name()}: quantised output not supported; quantise the result of a call without output_scale"
        )


def check_decode_operands(
    backend: MLADecodeBackend, metadata: MLACommonDecodeMetadata, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor
) -> None:
    """Refuse operands that a decode backend does not declare or that contradict the metadata; reads no device memory.

    Args:
        backend: the instance that is called.
        metadata: of the batch.
        ql_nope: [T, N, L].
        q_pe: [T, N, R].
        kv_cache: [blocks, page, entry width].

    Raises:
        UnsupportedConfiguration: something outside of the declaration.
        ValueError: shapes or lengths that do not fit the metadata.
    """
    query_lens = metadata.query_lens_cpu.tolist()
    config = MLADecodeSelectorConfig(
        dtype=ql_nope.dtype,
        kv_cache_dtype=backend.kv_cache_dtype,
        block_size=kv_cache.shape[1],
        kv_lora_rank=backend.kv_lora_rank,
        qk_rope_head_dim=backend.qk_rope_head_dim,
        max_query_len=max(query_lens),
        uniform=len(set(query_lens) - {0}) <= 1,  # requests without a query pad a graph's batch
        dcp_world_size=metadata.dcp_world_size,
        lse=metadata.dcp_world_size > 1,
    )
    require_declared(backend, ql_nope.device, config)
    for name, tensor, width in (("ql_nope", ql_nope, backend.kv_lora_rank), ("q_pe", q_pe, backend.qk_rope_head_dim)):
        _check_rows(name, tensor, sum(query_lens), backend.num_heads, width)
    check_cache("kv_cache", kv_cache, backend.kv_cache_dtype, backend, ql_nope.dtype)
    longest, page = max(metadata.seq_lens_cpu.tolist()), kv_cache.shape[1]
    if metadata.block_table.shape[1] * page < longest:
        raise ValueError(
            f"block_table: a sequence of {longest} tokens has {-(-longest // page)} pages of {page}, its row holds "
            f"{metadata.block_table.shape[1]}"
        )
