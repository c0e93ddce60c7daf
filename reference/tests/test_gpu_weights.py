"""The kernel for a GPU against the lines that say what it does."""

import pytest
import torch

from mla_conformance.reference import weights
from mla_conformance.reference.weights import weigh_with_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("rows", "keys"), [(8, 512), (5, 700), (1, 1), (130, 1025)])
def test_the_kernel_does_what_the_lines_say(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    scores = torch.randn(3, rows, keys, dtype=torch.float64, device="cuda", generator=generator)
    scores[:, :, keys // 2 + 1 :] = -torch.inf
    magnitudes = torch.rand(3, rows, keys, device="cuda", generator=generator).bfloat16()
    assert weights._kernel() is not None
    found = [_weighed(scores, magnitudes, rows)]
    monkeypatch.setattr(weights, "_kernel", lambda: None)
    found.append(_weighed(scores, magnitudes, rows))
    for kernel, plain in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain)


def _weighed(scores: torch.Tensor, magnitudes: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Weights, totals, largest and products; totals and largest are views into larger ones, as a panel's are."""
    p = scores.clone()
    totals = torch.ones(3, rows + 4, 2, dtype=torch.float64, device="cuda")[:, 2:-2]
    largest = torch.full((3, rows + 4, 1), 0.5, device="cuda")[:, 2:-2]
    products = weigh_with_products(p, magnitudes.clone(), totals, largest)
    return [p, totals, largest, *products]
