"""Stand-ins for GPU libraries: kernels that follow a library's documented conventions, behind its recorded signature.

``signatures.json`` holds the parameters of every function that an adapter calls, for every version that is claimed,
recorded from the packages by ci/signatures.py: most of them do not install where CI runs, and none runs there.
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.reference.attention import attention
from mla_conformance.reference.chunking import ContextChunk
from mla_conformance.reference.kv_cache import write_entries

HEADS, NOPE, ROPE, WIDTH, LATENT, SCALE = 2, 128, 64, 128, 512, 0.11
SIZES: dict[str, Any] = {"num_heads": HEADS, "scale": SCALE, "kv_lora_rank": LATENT, "v_head_dim": WIDTH}
SIZES |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
_RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text(encoding="utf-8"))


def _signature(label: str, function: str) -> inspect.Signature:
    kinds = {kind.name: kind for kind in inspect._ParameterKind}
    return inspect.Signature(
        [
            inspect.Parameter(
                name, kinds[kind], default=None if optional and kind != "VAR_POSITIONAL" else inspect._empty
            )
            for name, kind, optional in _RECORDED[label][function]
        ]
    )


@pytest.fixture
def recorded() -> Callable[[str, str, Callable[..., Any]], Callable[..., Any]]:
    """``recorded(label, function, kernel)``: the kernel behind the library's signature, with its arguments by name."""

    def bind(label: str, function: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(label, function)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return kernel(bound.arguments)

        stand_in.__signature__ = signature  # type: ignore[attr-defined]
        return stand_in

    return bind


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """``installed(module, name=value, ...)``: a library that consists of these attributes."""

    def install(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


@pytest.fixture
def planned(recorded: Callable[..., Any]) -> Callable[..., Any]:
    """``planned(label, name, run, begin)``: FlashInfer's class, whose plan ``run`` finds under ``planned``.

    ``begin`` sees what a wrapper is made with, and ``keep`` each plan.
    """

    def make(label: str, name: str, run: Any, begin: Any, keep: Any = lambda wrapper, a: None) -> Any:
        class Wrapper:
            planned: dict[str, Any]

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                recorded(label, f"{name}.__init__", lambda a: begin(self, a))(self, *args, **kwargs)
                self.run = recorded(label, f"{name}.run", lambda a: run(self, a)).__get__(self)
                self.plan = recorded(label, f"{name}.plan", self._keep).__get__(self)

            def _keep(self, a: Any) -> None:
                self.planned = dict(a)
                keep(self, a)

        Wrapper.run = recorded(label, f"{name}.run", run)
        return Wrapper

    return make


def exact(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [T, N, V] of the dtype that q's gives and natural LSE [N, T] float32; a row without keys is 0 and -inf."""
    state = attention(
        q, k, v, query_start_loc=queries.tolist(), key_start_loc=keys.tolist(), scale=scale, causal=causal
    )
    return state.output.to(output_dtype(q.dtype)), state.lse.float()


@pytest.fixture
def kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`exact`."""
    return exact


@pytest.fixture
def conforms() -> Callable[..., MLAPrefillBackend]:
    """Drive an adapter through new tokens and a context chunk, empty requests and strided operands among them."""

    def check(backend_class: type[MLAPrefillBackend], dtype: torch.dtype = torch.bfloat16) -> MLAPrefillBackend:
        backend = backend_class(**SIZES, vllm_config=None)
        for query_lens, context in (((3, 0, 9), None), ((3, 4, 2), (7, 0, 17))):
            tokens, start = sum(query_lens), torch.tensor([0, *query_lens]).cumsum(0)
            keys = start if context is None else torch.tensor([0, *context]).cumsum(0)
            q, k, v = _operands(tokens, int(keys[-1]), dtype)
            backend.prepare_metadata(_metadata(query_lens, context, dtype))
            want, want_lse = exact(q[:tokens], k, v, start, keys, SCALE, context is None)
            if context is None:
                output, lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
                out = torch.full((tokens + 1, HEADS, WIDTH), torch.nan, dtype=torch.bfloat16)
                written = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False, out=out)
                assert isinstance(written, Tensor) and written.data_ptr() == out.data_ptr()
                torch.testing.assert_close(out[:tokens], want, atol=1e-5, rtol=2.0**-8)
            else:
                output, lse = backend.run_prefill_context_chunk(0, q, k, v)
            assert output.shape == (tokens + 1, HEADS, WIDTH)
            assert (lse.shape, lse.dtype) == ((HEADS, tokens + 1), torch.float32)
            torch.testing.assert_close(output[:tokens], want, atol=1e-5, rtol=2.0**-8)
            torch.testing.assert_close(lse[:, :tokens], want_lse, atol=1e-5, rtol=1e-5)
        return backend

    return check


def _operands(tokens: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q with a row of NaN behind those that count; v the second half of a wider buffer, as in a model."""
    generator = torch.Generator().manual_seed(tokens + keys)
    q = torch.randn(tokens + 1, HEADS, NOPE + ROPE, generator=generator)
    q[tokens:] = torch.nan
    k = torch.randn(keys, HEADS, NOPE + ROPE, generator=generator)
    wide = torch.randn(keys, HEADS, NOPE + WIDTH, generator=generator)
    return q.to(dtype), k.to(dtype), wide.to(dtype)[..., NOPE:]


def _metadata(queries: tuple[int, ...], context: tuple[int, ...] | None, dtype: torch.dtype) -> Any:
    device, plan = torch.device("cpu"), None
    if context is not None:
        chunk = ContextChunk((0,) * len(context), context)
        plan = chunked_context_metadata([chunk], torch.zeros(sum(context), 576), device)
    table = torch.zeros(len(queries), 1, dtype=torch.int32)
    return prefill_metadata(queries, block_table=table, dtype=dtype, device=device, chunked_context=plan)


def absorbed(
    q: Tensor, pages: Tensor, lengths: Any, query_lens: Any, tables: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """What a paged MLA kernel computes of q [T, N, L + R] and pages [blocks, page, L + R], in float64.

    ``tables``: the pages of each request, and anything behind them. Returns output [T, N, L] of q's dtype and natural
    LSE [N, T].
    """
    page = pages.shape[1]
    used = [[int(block) for block in row[: -(-n // page)]] for row, n in zip(tables, lengths, strict=True)]
    rows = [pages[blocks].flatten(0, 1)[:length] for blocks, length in zip(used, lengths, strict=True)]
    keys = torch.cat(rows)[:, None, :]
    queries, ends = (torch.tensor([0, *x]).cumsum(0) for x in (query_lens, lengths))
    return exact(q, keys, keys[..., :LATENT], queries, ends, scale, True)


@pytest.fixture
def mla_kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`absorbed`."""
    return absorbed


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MLADecodeBackend]:
    """Drive a decode adapter through a batch with a request of padding, shuffled pages and poison around them."""

    def check(
        backend_class: type[MLADecodeBackend], page: int, query_lens: tuple[int, ...], lengths: tuple[int, ...]
    ) -> MLADecodeBackend:
        # The stand-in is all that the adapter needs, and it runs on a CPU.
        monkeypatch.setattr(backend_class, "missing_dependencies", list)
        monkeypatch.setattr(backend_class, "supports_compute_capability", lambda device_capability: True)
        backend = backend_class(**SIZES, kv_cache_dtype="auto", vllm_config=None)
        _decode(backend, page, query_lens, lengths)
        _decode(backend, page, query_lens, lengths[::-1])
        return backend

    return check


def _decode(backend: MLADecodeBackend, page: int, query_lens: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Over pages in no order, block 0 never among them; tables end in what no adapter may read."""
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // page) for length in lengths]
    blocks = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.full((len(counts), max(counts) + 2), -(2**30), dtype=torch.int32)
    cache = torch.full((sum(counts) + 1, page, LATENT + ROPE), torch.nan).bfloat16()
    for row, pages, length in zip(table, blocks, lengths, strict=True):
        row[: len(pages)], token = pages, torch.arange(length)
        rows = torch.randn(length, LATENT + ROPE, generator=generator).bfloat16()
        write_entries(cache, rows, pages[token // page] * page + token % page, "auto")
    q = torch.randn(sum(query_lens) + 1, HEADS, LATENT + ROPE, generator=generator).bfloat16()
    seq_lens, queries = (torch.tensor(x, dtype=torch.int32) for x in (lengths, query_lens))
    on_device: dict[str, Any] = {
        "seq_lens": seq_lens,
        "query_start_loc": torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int(),
    }
    on_host: dict[str, Any] = {"query_lens_cpu": queries, "seq_lens_cpu": seq_lens.clone()}
    longest: dict[str, Any] = {"max_query_len": max(query_lens), "max_seq_len": max(lengths)}
    backend.prepare_metadata(MLACommonDecodeMetadata(block_table=table, **on_device, **on_host, **longest))
    found: Any = backend.run_decode(q[..., :LATENT], q[..., LATENT:], cache, torch.tensor(1.0))
    output, lse = found if backend.returns_lse else (found, None)
    tokens = sum(query_lens)
    want, want_lse = absorbed(q[:tokens], cache, lengths, query_lens, table, SCALE)
    assert output.shape == (tokens + 1, HEADS, LATENT)
    torch.testing.assert_close(output[:tokens], want, atol=1e-5, rtol=2.0**-8)
    if lse is not None:
        assert (lse.shape, lse.dtype) == ((HEADS, tokens + 1), torch.float32)
        torch.testing.assert_close(lse[:, :tokens], want_lse, atol=1e-5, rtol=1e-5)
