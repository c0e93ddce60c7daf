"""The kernel for a GPU against the lines that say what it does, and the pass that uses it against the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.reference import blockwise, row_sums
from mla_conformance.reference.attention import attention
from mla_conformance.reference.blockwise import blockwise_attention
from mla_conformance.reference.row_sums import weigh_with_products
from mla_conformance.reference.tiles import Queries, Tile, TileKeys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(64, 512), (5, 700), (1, 1), (130, 1025)])
def test_the_kernel_does_what_the_lines_say(
    rows: int, keys: int, masked: bool, shifted: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = _normal(1, 3, 2 * rows, 96, dtype=dtype)[:, rows:], _normal(2, 3, keys + 8, 96, dtype=dtype)[:, 8:]
    low = torch.bfloat16
    factor = None if dtype == torch.float64 else torch.full((), 0.1, dtype=torch.float64, device="cuda")
    seen = torch.arange(rows, device="cuda") + (keys - rows) if masked else None
    queries = Queries(q * 0.1 if factor is None else q, factor, (q * 0.1).abs().to(low))
    tile = Tile(queries, TileKeys(k, q.new_zeros(3, keys, 1), k.abs().to(low)), seen)
    shift = _normal(3, 3, rows, 1, dtype=torch.float64) if shifted else None
    assert row_sums._kernel(96, dtype, dtype) is not None
    found = [_weighed(tile, shift)]
    monkeypatch.setattr(row_sums, "_kernel", lambda *_: None)
    found.append(_weighed(tile, shift))
    for kernel, plain in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain)
    torch.testing.assert_close(found[0][1][..., 0], found[1][1][..., 0], rtol=1e-13, atol=0.0)


def _weighed(tile: Tile, shift: Tensor | None) -> list[Tensor]:
    """Weights, both totals, largest, products; totals and largest are views into larger ones, as a panel's are."""
    rows = tile.queries.wide.shape[1]
    totals = torch.ones(3, rows + 4, 2, dtype=torch.float64, device="cuda")[:, 2:-2]
    largest = torch.full((3, rows + 4, 1), 0.5, device="cuda")[:, 2:-2]
    found, products = weigh_with_products(tile, shift, totals, largest)
    torch.testing.assert_close(found.sum(-1), totals[..., 0] - 1.0)
    # The magnitudes' sum is one of bfloat16 numbers in the lines, of what they are rounded from in the kernel.
    return [found, totals[..., :1], totals[..., 1].bfloat16(), largest, products]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 40.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, [0, 1, 700, 2999]])
def test_the_pass_with_the_kernel_agrees_with_the_definition(
    dtype: torch.dtype, factor: float, causal: bool, rows: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_LOW_PRECISION_PAIRS", 0)
    monkeypatch.setattr(blockwise, "_block_pairs", lambda device: 0)
    q, k, v = (_normal(seed, 3000, 2, width, dtype=dtype) for seed, width in ((1, 192), (2, 192), (3, 128)))
    options: dict[str, Any] = {"query_start_loc": (0, 2500, 3000), "key_start_loc": (0, 2500, 3000), "scale": 0.07}
    options |= {"causal": causal, "with_terms": True}
    fast = blockwise_attention(factor * q, k, v, **options, rows=rows)
    plain = attention(factor * q, k, v, **options)
    chosen = slice(None) if rows is None else torch.tensor(rows, device="cuda")
    torch.testing.assert_close(fast.output, plain.output[chosen], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.lse, plain.lse[:, chosen], rtol=1e-13, atol=1e-13)
    assert fast.terms is not None and plain.terms is not None
    for name, term in plain.terms.by_name().items():
        part = term[:, chosen] if name == "lse_score" else term[chosen]
        ratio = getattr(fast.terms, name).double() / part
        assert ratio.min() > 1.0 and ratio.max() < 1.05, name
