"""A badge: the verdict on one kernel as a small picture, for a README."""

from html import escape

from mla_conformance.report.shown import shown
from mla_conformance.scoreboard.entry import Entry

_BACK = {"right": "#12683a", "wrong": "#a8071a", "old": "#57606a"}
_LETTER, _MARGIN, _HEIGHT = 6.6, 12, 20
"""Pixels; the width of a letter is that of a common sans serif on average."""
_LONGEST = 200


def badge(entry: Entry) -> str:
    """An SVG that says the verdict in words, whatever its colour."""
    record = entry.record
    left, right = shown(record.backend, _LONGEST), shown(f"{entry.verdict} · {record.device} · {entry.state}", _LONGEST)
    widths = [len(text) * _LETTER + _MARGIN for text in (left, right)]
    colour = _BACK["old" if entry.old else "wrong" if entry.is_wrong else "right"]
    title = escape(f"{left}: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths):.0f}" height="{_HEIGHT}" '
        f'role="img" aria-label="{title}"><title>{title}</title>'
        f'<rect width="{sum(widths):.0f}" height="{_HEIGHT}" rx="3" fill="#24292f"/>'
        f'<rect x="{widths[0]:.0f}" width="{widths[1]:.0f}" height="{_HEIGHT}" rx="3" fill="{colour}"/>'
        f'<g fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11">'
        f"{_text(left, 0, widths[0])}{_text(right, widths[0], widths[1])}</g></svg>\n"
    )


def _text(text: str, start: float, width: float) -> str:
    """A text in the middle of its part, squeezed or stretched to it whatever the font."""
    room = width - _MARGIN
    return (
        f'<text x="{start + _MARGIN / 2:.1f}" y="14" textLength="{room:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
