"""Normal numbers from counters: the same bytes on every device, made where they are used.

PyTorch's generators draw other numbers on a GPU than on a CPU, and a CPU draws ten million a second. Here a number is
the sum of the eight bytes of a hash of its index, centred and scaled: integer arithmetic and one rounded product, so
no device differs. It stays within five deviations.
"""

import torch

COUNTER_SEEDS = 2**23
"""Seeds from 0 on that there are; each has 2^40 numbers of its own."""
_CHUNK = 2**25
_LOW_BITS = 2**63 - 1
_DEVIATION = (8 * (256**2 - 1) / 12) ** 0.5
_MEAN = 8 * 255 // 2
_STEPS = ((30, -4658895280553007687), (27, -7723592293110705685))
"""Shift and multiplier of the two rounds of splitmix64 (Steele, Lea and Flood 2014); 64 bits, signed."""
_INCREMENT = -7046029254386353131


def fill_normal(out: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a contiguous tensor of any float dtype with numbers of mean 0 and variance 1; other seeds, other numbers."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=out.device)
        total = _hashed(index.add_(seed * 2**40)).view(torch.uint8).view(-1, 8).sum(dim=-1, dtype=torch.int32)
        part.copy_(total.sub_(_MEAN).float().mul_(1 / _DEVIATION))
    return out


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """64 well-mixed bits of each int64, in place."""
    x.mul_(_INCREMENT)
    for shift, multiplier in _STEPS:
        x.bitwise_xor_(_shifted(x, shift)).mul_(multiplier)
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right that fills with zeros, which PyTorch's signed one does not."""
    return (x >> bits).bitwise_and_(_LOW_BITS >> (bits - 1))
