"""Where errors are, by head and row, as a picture that needs nothing else: an SVG file."""

import torch

from mla_conformance.judging.measured import Measured

MOST_HEADS, MOST_ROWS = 64, 64
"""Heads and rows that a picture tells apart."""
_CELL = 10
_MARGIN = 24
_BEYOND = 9


def heat(measured: Measured) -> list[list[int]]:
    """For each head, from each row, how far the error is over its budget; of several rows or heads the largest.

    0 is within the budget, n above it and at most 10^n times it, 9 that or anything beyond, NaN included.

    Args:
        measured: an output [T, N, V], of which the worst column counts, or an LSE [N, T].
    """
    error = torch.where(measured.got == measured.golden, 0.0, (measured.got - measured.golden).abs())
    share = torch.where(error == 0, 0.0, error / measured.allowed).nan_to_num(torch.inf, torch.inf)
    by_head = share.amax(dim=-1).mT if share.dim() > 2 else share
    size = min(by_head.shape[0], MOST_HEADS), min(by_head.shape[1], MOST_ROWS)
    largest = torch.nn.functional.adaptive_max_pool2d(by_head[None].double().contiguous(), size)[0]
    return [[int(digit) for digit in line] for line in largest.log10().ceil().clamp(0, _BEYOND).tolist()]


def svg(name: str, lines: list[list[int]]) -> str:
    """The picture: a cell for each head and row, the darker the further over the budget; words for who sees none."""
    rows, heads = len(lines[0]), len(lines)
    wrong = sum(digit > 0 for line in lines for digit in line)
    words = f"{name}: {wrong} of {rows * heads} cells over their budget; {heads} heads down, {rows} rows to the right"
    cells = "\n".join(
        f'<rect x="{x * _CELL}" y="{_MARGIN + y * _CELL}" width="{_CELL}" height="{_CELL}" '
        f'opacity="{0.2 + 0.8 * digit / _BEYOND:.2f}"><title>up to 10^{digit} times</title></rect>'
        for y, line in enumerate(lines)
        for x, digit in enumerate(line)
        if digit
    )
    width, height = max(rows * _CELL, 6 * len(words)), _MARGIN + heads * _CELL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>{words}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text y="{_MARGIN - 8}" font-family="sans-serif" font-size="11">{words}</text>\n'
        f'<rect y="{_MARGIN}" width="{rows * _CELL}" height="{heads * _CELL}" fill="#eef1f4"/>\n'
        f'<g fill="#a8071a">\n{cells}\n</g>\n</svg>\n'
    )
