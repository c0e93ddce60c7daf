"""Sparse adapters driven through lists with holes over a poisoned cache, and what a library computes of such lists."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.selected import listed
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.reference.cache_layout import cache_dtype, decode_rows, encode, entry_width
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.kv_cache import write_entries
from mla_conformance.reference.selected import NO_KEY, selected_attention

TOKENS, KEYS, LATENT, SCALE, K_SCALE = 5, 70, 512, 0.05, 0.25
_KEYLESS, _HUGE = 2, 2**30


class Lists(NamedTuple):
    """Keys [S, D] float64, the cache that holds them, the lists [T, K] of its slots, and their lengths, if any."""

    keys: Tensor
    cache: Tensor
    slots: Tensor
    indices: Tensor
    length: Tensor | None

    @property
    def numbers(self) -> Tensor:
        """[T, K] int64: which key each entry names, or -1."""
        number = torch.full((int(self.slots.max()) + 1,), NO_KEY)
        number[self.slots] = torch.arange(len(self.slots))
        named = listed(self.indices, self.length)
        return torch.where(named, number[self.indices.long().masked_fill(~named, 0)], NO_KEY)


def attended(q: Tensor, keys: Tensor, lists: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of q [T, N, D], keys [S, D] and numbers of them [T, K], or -1: output [T, N, L] of q's dtype, LSE [T, N]."""
    state = selected_attention(q, keys[:, None], keys[:, None, :LATENT], lists, scale=scale, sink=sink)
    return state.output.to(q.dtype), state.lse.mT.float()


@pytest.fixture
def sparse_kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`attended`."""
    return attended


@pytest.fixture
def slots_of() -> Callable[[Tensor, str], Tensor]:
    """Every slot of a cache [blocks, page, width] of a layout, as a kernel reads it: [S, D]."""

    def read(cache: Tensor, layout: str) -> Tensor:
        slots = torch.arange(cache.shape[0] * cache.shape[1])
        return dequantise(gather(cache, slots, layout), layout, torch.tensor(1.0), torch.bfloat16)

    return read


class Asked(NamedTuple):
    """What an adapter is asked for; a layout of None is gathered keys.

    ``length``, ``sink`` and ``extra`` are handed over besides, ``keyless`` says whether one list names nothing.
    """

    layout: str | None
    page: int = 64
    heads: int = 64
    topk: int = 128
    rope: int = 64
    length: bool = False
    sink: bool = False
    extra: bool = False
    keyless: bool = True
    lse: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def stored(self) -> str:
        """The layout of what is read."""
        return self.layout or "auto"


@pytest.fixture
def selects(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MLASparseBackend]:
    """``selects(class, layout, …)``: drive a sparse adapter, of :class:`Asked`, and compare with the definition."""

    def check(backend_class: type[MLASparseBackend], layout: str | None, **others: Any) -> MLASparseBackend:
        # The stand-in is all that the adapter needs, and it runs on a CPU.
        monkeypatch.setattr(backend_class, "missing_dependencies", list)
        monkeypatch.setattr(backend_class, "supports_compute_capability", lambda device_capability: True)
        asked = Asked(layout, **others)
        second = layout if asked.extra else None
        backend = backend_class(asked.heads, SCALE, LATENT, 128, asked.rope, 128, asked.stored, None, second)
        generator = torch.Generator().manual_seed(asked.topk + asked.heads)
        q = torch.randn(TOKENS, asked.heads, LATENT + asked.rope, generator=generator).to(asked.dtype)
        sources = [_drawn(asked, asked.page if layout else 1, asked.topk, generator)]
        if asked.extra:
            sources.append(_drawn(asked, 2 * asked.page, asked.topk // 2, generator))
        sink = torch.randn(asked.heads, generator=generator) if asked.sink else None
        backend.prepare_metadata(_metadata(paged=layout is not None))
        _agrees(*_called(backend, q, sources, sink, asked), q, sources, sink)
        return backend

    return check


def _drawn(asked: Asked, page: int, topk: int, generator: torch.Generator) -> Lists:
    """Keys at shuffled slots of a cache that is poison elsewhere, and lists with holes; behind lengths huge numbers."""
    layout, rope, dtype = asked.stored, asked.rope, asked.dtype
    latents = torch.randn(KEYS, LATENT + rope, generator=generator).to(dtype)
    rows = encode(latents[:, :LATENT], latents[:, LATENT:], layout, K_SCALE, "pow2" if rope else "float32")
    slots = torch.randperm(2 * KEYS, generator=generator)[:KEYS]
    cache = _poisoned(layout, page, -(-2 * KEYS // page), rope, dtype)
    write_entries(cache, rows, slots, layout)
    indices = torch.full((TOKENS, topk), NO_KEY, dtype=torch.int32)
    counts = torch.randint(1, topk + 1, (TOKENS,), generator=generator)
    for token in range(TOKENS):
        columns = torch.randperm(int(counts[token]), generator=generator)[: KEYS // 2]
        if token != _KEYLESS or not asked.keyless:
            indices[token, columns] = slots[torch.randperm(KEYS, generator=generator)[: len(columns)]].int()
    if asked.length:
        indices[torch.arange(topk) >= counts[:, None]] = _HUGE
    keys = torch.cat(decode_rows(rows, layout, K_SCALE, LATENT, rope, dtype), dim=-1)
    return Lists(keys, cache, slots, indices, counts.int() if asked.length else None)


def _poisoned(layout: str, page: int, blocks: int, rope: int, dtype: torch.dtype) -> Tensor:
    """[blocks, page, width] of NaN, each block with what rounds a page up behind it."""
    stored, width = cache_dtype(layout, dtype), entry_width(layout, LATENT, rope)
    form = TILED_FORMATS.get(layout)
    size = form.page_bytes(page) if form else page * width
    if stored.is_floating_point and stored.itemsize > 1:
        return torch.full((blocks, page, width), torch.nan, dtype=stored)
    buffer = torch.full((blocks, size), 0xFF, dtype=torch.uint8)
    return buffer[:, : page * width].unflatten(1, (page, width)).view(stored)


def _metadata(paged: bool) -> MLASparseMetadata:
    """Each query token is a request."""
    ones = torch.ones(TOKENS, dtype=torch.int32)
    tables = torch.zeros(TOKENS, 1, dtype=torch.int32)
    return MLASparseMetadata(
        query_start_loc=torch.arange(TOKENS + 1, dtype=torch.int32),
        req_id_per_token=torch.arange(TOKENS, dtype=torch.int32),
        seq_lens=KEYS * ones,
        block_table=tables if paged else None,
        workspace_starts=None if paged else tables[:, 0],
        index_space=IndexSpace.SLOT,
        max_query_len=1,
        max_seq_len=KEYS,
        query_lens_cpu=ones,
        seq_lens_cpu=KEYS * ones,
    )


def _called(
    backend: MLASparseBackend, q: Tensor, sources: list[Lists], sink: Tensor | None, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    main, given = sources[0], {} if sink is None else {"attn_sink": sink}
    given |= {} if main.length is None else {"topk_length": main.length}
    for extra in sources[1:]:
        given |= {"extra_kv_cache": extra.cache, "extra_topk_indices": extra.indices}
        given |= {} if extra.length is None else {"extra_topk_length": extra.length}
    if asked.layout:
        found: Any = backend.run_sparse_decode(q, main.cache, torch.tensor(K_SCALE), main.indices, asked.lse, **given)
    else:
        found = backend.run_sparse_prefill(q, main.cache, main.indices, asked.lse, **given)
    return found if asked.lse else (found, None)


def _agrees(output: Tensor, lse: Tensor | None, q: Tensor, sources: list[Lists], sink: Tensor | None) -> None:
    keys, numbers = sources[0].keys, sources[0].numbers
    for extra in sources[1:]:
        behind = extra.numbers
        numbers = torch.cat((numbers, torch.where(behind == NO_KEY, NO_KEY, behind + len(keys))), dim=1)
        keys = torch.cat((keys, extra.keys))
    want, want_lse = attended(q, keys, numbers, SCALE, sink)
    assert (output.shape, output.dtype) == (want.shape, q.dtype)
    torch.testing.assert_close(output, want, atol=1e-3, rtol=2.0**-7)
    if lse is not None:
        assert (lse.shape, lse.dtype) == ((q.shape[1], TOKENS), torch.float32)
        torch.testing.assert_close(lse, want_lse.mT, atol=1e-4, rtol=1e-5)
