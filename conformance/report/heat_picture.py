"""A heat map as a picture: SVG that takes the colours of the page it stands on, or has its own as a file."""

from html import escape
from itertools import groupby

from mla_conformance.diagnosis.heat_map import BEYOND, HeatMap
from mla_conformance.report.terminal import counted, shown

_SIDE, _CELL = 256, 12
"""Pixels: of the longer side, at most, and of a cell."""
_MARGIN, _LETTER = 24, 6
"""Pixels of a file: above the picture, and of a letter of its words."""


def words(heat_map: HeatMap) -> str:
    """What the picture shows, for who sees none and for who does not know what it means."""
    several = "the worst of several in a cell; " if heat_map.cells < heat_map.heads * heat_map.rows else ""
    return (
        f"{heat_map.part}: {heat_map.wrong} of {counted(heat_map.cells, 'cell')} over their budget; "
        f"{counted(heat_map.heads, 'head')} down, {counted(heat_map.rows, 'row')} to the right; "
        f"{several}stronger colour = further over budget"
    )


def picture(heat_map: HeatMap) -> str:
    """The cells as an element of a page, whose styles decide the colours: ``ground``, ``over`` and ``between``."""
    down, right, cell = len(heat_map.lines), len(heat_map.lines[0]), _cell(heat_map)
    between = [f"M0 {y}h{right}" for y in range(1, down)] + [f"M{x} 0v{down}" for x in range(1, right)]
    return (
        f'<svg role="img" viewBox="0 0 {right} {down}" width="{right * cell}" height="{down * cell}">\n'
        f"<title>{_text(heat_map.part)}, by head and row</title>\n"
        f'<path class="ground" d="M0 0h{right}v{down}H0z" fill="#eef1f4"/>\n'
        f"{''.join(_over(heat_map, digit) for digit in range(1, BEYOND + 1))}"
        f'<path class="between" d="{"".join(between)}" stroke="#fff" stroke-width="0.1"/>\n</svg>'
    )


def picture_file(heat_map: HeatMap) -> str:
    said = _text(words(heat_map))
    width, height = max(_SIDE, _LETTER * len(said)), _MARGIN + len(heat_map.lines) * _cell(heat_map)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>{said}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text y="{_MARGIN - 8}" font-family="sans-serif" font-size="11">{said}</text>\n'
        f'<g transform="translate(0 {_MARGIN})">{picture(heat_map)}</g>\n</svg>\n'
    )


def _cell(heat_map: HeatMap) -> int:
    return min(_CELL, _SIDE // max(len(heat_map.lines), len(heat_map.lines[0])))


def _over(heat_map: HeatMap, digit: int) -> str:
    """The cells of this digit, neighbours in a line as one; nothing where there are none."""
    runs = []
    for y, line in enumerate(heat_map.lines):
        x = 0
        for each, group in groupby(line):
            many = len(list(group))
            runs += [f"M{x} {y}h{many}v1h-{many}z"] if each == str(digit) else []
            x += many
    further = f"up to 10^{digit} times the budget" if digit < BEYOND else "further over the budget, or no number"
    opacity = 0.5 + 0.5 * digit / BEYOND  # the least stands out from the ground, too
    path = f'<path class="over" d="{"".join(runs)}" fill="#a8071a" fill-opacity="{opacity:.2f}">'
    return f"{path}<title>{further}</title></path>\n" if runs else ""


def _text(text: str) -> str:
    return escape(shown(text))
