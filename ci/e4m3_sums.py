"""How many bits a sum of e4m3 products keeps in the tensor core of a GPU that multiplies them; needs torch alone."""

import sys

import torch

LENGTH, STEP = 128, 32  # products of a sum, and of an instruction
BITS = 20  # looked for; float32 would keep 23


def small_is_kept(bits: int, place: int, fast: bool) -> bool:
    """Whether 2^8 and a product of 2^(8 - bits) at ``place`` add up to more than 2^8."""
    a, b = torch.zeros(2, 16, LENGTH, device="cuda")
    a[:, 0], b[:, 0] = 2.0**4, 2.0**4
    half = (8 - bits) // 2
    a[:, place], b[:, place] = 2.0**half, 2.0 ** (8 - bits - half)
    one, operands = torch.ones((), device="cuda"), (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T)
    found = torch._scaled_mm(*operands, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)
    return found[0, 0].item() > 2.0**8


if __name__ == "__main__":
    for fast in (False, True):
        for place in (1, *range(STEP, LENGTH, STEP)):
            kept = max((bits for bits in range(1, BITS) if small_is_kept(bits, place, fast)), default=0)
            sys.stdout.write(f"fast accumulation {fast}, 2^8 at 0, 2^(8 - n) at {place}: kept up to n = {kept}\n")
