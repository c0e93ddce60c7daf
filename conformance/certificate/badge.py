"""A badge: backend, suite and counts of a certificate as a small SVG without a network."""

from html import escape

from mla_conformance.certificate.verify import Certificate

_CHARACTER = 6.6
_PADDING = 12
_TEMPLATE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{text}">
<title>{text}</title>
<rect width="{width}" height="20" rx="3" fill="#3b4148"/>
<path d="M{left} 0h{bend}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{bend}z" fill="{color}"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_x}" y="14">{label}</text>
<text x="{value_x}" y="14">{value}</text>
</g>
</svg>
"""


def badge(certificate: Certificate) -> str:
    """The badge; yellow if failures are waived."""
    counts = certificate["counts"]
    label = f"MLA conformance {certificate['suite']}"
    value = f"{certificate['backend']} {counts['passed']}/{counts['listed'] - counts['unsupported']}"
    left, right = (round(len(text) * _CHARACTER + _PADDING) for text in (label, value))
    return _TEMPLATE.format(
        width=left + right,
        left=left,
        bend=right - 3,
        color="#7a5c00" if counts["waived"] else "#1a6b3c",
        label=escape(label),
        value=escape(value),
        label_x=left / 2,
        value_x=left + right / 2,
        text=escape(f"{label}: {value} on {certificate['device']}"),
    )
