"""YaRN against what its ends must be, and DeepSeek-V3's numbers."""

import math
from itertools import pairwise
from typing import Any

import pytest

from mla_conformance.reference.rope import Rotation, plain_frequencies
from mla_conformance.reference.yarn import Yarn

V3 = Yarn(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)


def test_fast_pairs_stay_slow_ones_are_slowed_down_and_those_between_lie_between() -> None:
    rotation, plain = Rotation.extended(V3, 64, interleaved=True), plain_frequencies(64, 1e4)
    shares = [frequency / before for frequency, before in zip(rotation.frequencies, plain, strict=True)]
    assert rotation.dim == 64 and rotation.interleaved and rotation.magnitude == 1.0
    # Pair 10 turns 37 times over 4096 tokens and pair 23 less than once, so the ramp runs between these.
    assert shares[:11] == [1.0] * 11 and shares[23:] == pytest.approx([1 / 40] * 9)
    steps = {round(a - b, 12) for a, b in pairwise(shares[10:24])}
    assert steps == {round((1 - 1 / 40) / 13, 12)}


def test_temperature() -> None:
    """A model with one factor for rotated parts only, with DeepSeek's, and with an extension by 1."""
    temperature = 0.1 * math.log(40) + 1
    assert V3.softmax_factor == pytest.approx(temperature**2) and V3.magnitude == 1.0
    paper = Yarn(factor=40.0, original_positions=4096)
    assert paper.magnitude == pytest.approx(temperature) and paper.softmax_factor == 1.0
    halved = Yarn(factor=40.0, original_positions=4096, mscale=0.5, mscale_all_dim=1.0)
    assert halved.magnitude == pytest.approx((0.05 * math.log(40) + 1) / temperature)
    none = Yarn(factor=1.0, original_positions=4096)
    assert none.magnitude == 1.0 and none.slowed(plain_frequencies(8, 1e4), 1e4) == pytest.approx(
        plain_frequencies(8, 1e4)
    )


def test_a_ramp_without_width_is_a_step() -> None:
    """Everything turns less than once over a context of a token."""
    plain = plain_frequencies(8, 1e4)
    slowed = Yarn(factor=4.0, original_positions=1).slowed(plain, 1e4)
    assert slowed == pytest.approx([plain[0], *(f / 4 for f in plain[1:])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, "factor of YaRN must be finite and at least 1, got 0.5"),
        ({"factor": None}, "factor of YaRN must be finite and at least 1, got None"),
        ({"original_positions": 0}, "original_positions of YaRN must be finite and at least 1"),
        ({"beta_slow": 64.0}, "0 < beta_slow <= beta_fast, got 64.0 and 32.0"),
        ({"mscale": -1.0}, "mscale of YaRN must be finite and at least 0"),
    ],
)
def test_refusals(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Yarn(**{"factor": 40.0, "original_positions": 4096} | change)
    with pytest.raises(ValueError, match="a base of RoPE above 1, got 1"):
        Rotation.extended(V3, 8, base=1.0, interleaved=True)
