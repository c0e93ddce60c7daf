"""Blocks of a request, requests of one shape together, and a GPU's kernel, against the definition."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import mla_conformance.reference.blockwise as module
from mla_conformance.reference import tiles
from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.blockwise import blockwise_attention, by_shape
from mla_conformance.reference.tiles import Blocks

Normal = Callable[..., Tensor]
BATCH: dict[str, Any] = {"query_start_loc": (0, 4, 4, 24, 25), "key_start_loc": (0, 7, 9, 48, 48), "scale": 0.4}
SIZES = [
    Blocks(heads=1, panel=12, queries=4, step=1, keys=5, span=10),
    Blocks(heads=3, panel=40, queries=20, step=10, keys=7, span=14),
    Blocks(heads=4, panel=64, queries=64, step=16, keys=128, span=128),
]


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "plan_blocks", lambda *_, **__: request.param)
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 0)
    monkeypatch.setattr(module, "_SHARED_ROWS", 0)


@pytest.fixture
def blocks(sizes: None) -> Iterator[None]:
    """The same, in a test that would mean nothing if the definition were compared with itself."""
    with patch.object(tiles, "in_lanes", wraps=tiles.in_lanes) as run:
        yield
    assert run.called


@pytest.fixture
def qkv(normal: Normal) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, 25, 4, 6), normal(2, 48, 4, 6), normal(3, 48, 4, 5)


def assert_same(fast: AttentionState, plain: AttentionState, terms: float = 2e-5) -> None:
    torch.testing.assert_close(fast.output, plain.output, rtol=1e-11, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(fast.lse, plain.lse, rtol=1e-13, atol=1e-13, equal_nan=True)
    assert (fast.terms is None) == (plain.terms is None)
    for name, term in plain.terms.by_name().items() if plain.terms else ():
        torch.testing.assert_close(getattr(fast.terms, name).double(), term, rtol=terms, atol=1e-30, equal_nan=True)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_agrees_with_the_definition(qkv: tuple[Tensor, ...], causal: bool, dtype: Any) -> None:
    """Of float64; of narrow inputs with one shared head; rows behind the requests are nobody's."""
    given = qkv if dtype is None else [qkv[0].to(dtype), *(x[:, :1].to(dtype) for x in qkv[1:])]
    padded = [torch.cat((x, torch.full_like(x[:3], torch.nan))) for x in given]
    expected = attention(*given, **BATCH, causal=causal, with_terms=True)
    assert_same(blockwise_attention(*padded, **BATCH, causal=causal), expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("factor", "scale", "offset"), [(0, 0.4, 0), (30, -0.4, 0), (1e6, 0.4, 0), (1, 0.4, 2e3)])
def test_any_range_of_logits(qkv: tuple[Tensor, ...], factor: float, scale: float, offset: float) -> None:
    """Spread far, or a constant on all of them."""
    q, k, v = qkv
    q = torch.cat([q * factor, torch.full_like(q[..., :1], offset)], -1)
    k = torch.cat([k, torch.ones_like(k[..., :1])], -1)
    options = {**BATCH, "scale": scale, "causal": True}
    fast, plain = blockwise_attention(q, k, v, **options), attention(q, k, v, **options, with_terms=True)
    # A logit of size x is known to x·2^-53, so weights are to as much, relatively.
    size = max(1.0, float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * 0.4)
    torch.testing.assert_close(fast.output, plain.output, rtol=0, atol=1e-14 * size)
    torch.testing.assert_close(fast.lse, plain.lse, rtol=1e-13, atol=1e-13)
    assert fast.terms is not None and plain.terms is not None
    torch.testing.assert_close(fast.terms.score.double(), plain.terms.score, rtol=2e-5 + 1e-13 * size, atol=1e-25)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("where", "poison"), [("q", torch.nan), ("k", torch.inf), ("k", torch.nan), ("v", torch.inf)])
def test_bad_numbers_as_the_definition_has_them(qkv: tuple[Tensor, ...], poison: float, where: str) -> None:
    operands: dict[str, Any] = {name: x.clone() for name, x in zip("qkv", qkv, strict=True)}
    operands[where][6] = poison
    expected = attention(**operands, **BATCH, causal=True, with_terms=True)
    assert_same(blockwise_attention(**operands, **BATCH, causal=True), expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [(0,), (3, 4, 17, 23, 24), range(25)])
def test_chosen_rows_are_rows_of_the_whole(qkv: tuple[Tensor, ...], causal: bool, rows: tuple[int, ...]) -> None:
    whole = attention(*qkv, **BATCH, causal=causal, with_terms=True)
    some = blockwise_attention(*qkv, **BATCH, causal=causal, rows=list(rows))
    index = torch.tensor(rows, dtype=torch.long)
    assert some.terms is not None and whole.terms is not None
    torch.testing.assert_close(some.output, whole.output[index], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(some.lse, whole.lse[:, index], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(some.terms.score.double(), whole.terms.score[index], rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(some.terms.lse_score.double(), whole.terms.lse_score[:, index], rtol=2e-5, atol=1e-30)
    none = blockwise_attention(*qkv, **BATCH, causal=causal, rows=[])
    assert none.output.shape == (0, 4, 5) and none.lse.shape == (4, 0)
    assert none.terms is not None and none.terms.score.shape == (0, 4, 5)


@pytest.mark.parametrize("scale", [0.2, 4.0], ids=["many keys weigh", "one key weighs"])
def test_low_precision_terms_are_close_and_not_too_small(normal: Normal, monkeypatch: Any, scale: float) -> None:
    monkeypatch.setattr(module, "low_precision", lambda *_: torch.bfloat16)
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 0)
    q, k, v = normal(1, 130, 2, 48), normal(2, 400, 2, 48), normal(3, 400, 2, 16)
    options: dict[str, Any] = {"query_start_loc": (0, 130), "key_start_loc": (0, 400), "scale": scale, "causal": True}
    fast = blockwise_attention(q, k, v, **options)
    plain = attention(q, k, v, **options, with_terms=True)
    assert fast.terms is not None and plain.terms is not None
    for name, term in plain.terms.by_name().items():
        ratio = getattr(fast.terms, name) / term
        assert float(ratio.min()) > 1.0 and float(ratio.max()) < 1.05, name
    torch.testing.assert_close(fast.output, plain.output, rtol=1e-12, atol=1e-13)


ALIKE = [([3, 3, 3, 3], [5, 5, 5, 5]), ([1] * 9, [1] * 9), ([2, 2, 4, 4, 4, 2], [7, 7, 7, 7, 3, 7])]
ALIKE += [([0, 0, 3, 3], [4, 4, 0, 0]), ([6, 1, 1], [2, 2, 2])]


def operands_of(normal: Normal, q_lens: list[int], kv_lens: list[int], shared: bool) -> dict[str, Any]:
    heads, starts = 1 if shared else 2, ([0, *accumulate(lens)] for lens in (q_lens, kv_lens))
    made = {"q": normal(1, sum(q_lens), 2, 6), "k": normal(2, sum(kv_lens), heads, 6)}
    made |= {"v": normal(3, sum(kv_lens), heads, 5)}
    return {**made, **dict(zip(("query_start_loc", "key_start_loc"), starts, strict=True))}


@pytest.mark.parametrize("workspace", [1, 100, 2**22])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("q_lens", "kv_lens"), ALIKE)
def test_requests_of_one_shape_together(
    normal: Normal, q_lens: list[int], kv_lens: list[int], shared: bool, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = operands_of(normal, q_lens, kv_lens, shared)
    given = [partial(attention, scale=0.4, causal=x, with_terms=True, with_key_terms=True) for x in (True, False)]
    plain = [attend(**batch) for attend in given]
    monkeypatch.setattr("mla_conformance.reference.attention.WORKSPACE_ELEMENTS", workspace)
    for attend, expected in zip(given, plain, strict=True):
        assert_same(by_shape(attend, **batch), expected, 1e-13)


def test_a_bad_number_stays_in_its_request(normal: Normal) -> None:
    batch = operands_of(normal, [3, 3, 3], [4, 4, 4], False)
    batch["k"][4] = torch.nan
    attend = partial(attention, scale=0.4, causal=True, with_terms=True)
    found = by_shape(attend, **batch)
    assert_same(found, attend(**batch), 1e-13)
    assert found.output.isnan().any() and not found.output[:3].isnan().any() and not found.output[6:].isnan().any()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, device="cuda", generator=generator).to(dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 40.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, [0, 1, 700, 2999]])
def test_the_pass_with_the_kernel_agrees_with_the_definition(
    dtype: torch.dtype, factor: float, causal: bool, rows: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOW_PRECISION_PAIRS", 0)
    monkeypatch.setattr(module, "workspace_elements", lambda device: 0)
    q, k, v = (_normal(seed, 3000, 2, width, dtype=dtype) for seed, width in ((1, 192), (2, 192), (3, 128)))
    options: dict[str, Any] = {"query_start_loc": (0, 2500, 3000), "key_start_loc": (0, 2500, 3000), "scale": 0.07}
    fast = blockwise_attention(factor * q, k, v, **options, causal=causal, rows=rows)
    plain = attention(factor * q, k, v, **options, causal=causal, with_terms=True)
    chosen = slice(None) if rows is None else torch.tensor(rows, device="cuda")
    torch.testing.assert_close(fast.output, plain.output[chosen], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.lse, plain.lse[:, chosen], rtol=1e-13, atol=1e-13)
    assert fast.terms is not None and plain.terms is not None
    for name, term in plain.terms.by_name().items():
        part = term[:, chosen] if name == "lse_score" else term[chosen]
        ratio = getattr(fast.terms, name).double() / part
        assert ratio.min() > 1.0 and ratio.max() < 1.05, name
