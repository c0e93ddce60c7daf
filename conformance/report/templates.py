"""Pages from templates: what is shown is escaped and cut, in the one look that ``look.html.j2`` of this room holds."""

from typing import Any

from mla_conformance.report.shown import MESSAGE, shown_lines


def render(room: str, template: str, **values: Any) -> str:
    """A page.

    Args:
        room: package that holds the template; what it imports may stand in this room as well.
        template: name of its file.
        values: what it shows; a name that is missing is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(package, ".") for package in (room, "mla_conformance.report")])
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_shown
    )
    environment.filters["whole"] = _whole
    return environment.get_template(template).render(**values)


def _shown(value: object) -> object:
    """What the template puts out, where it is no markup of its own."""
    return shown_lines(value, MESSAGE) if type(value) is str else value


def _whole(text: str) -> object:
    """A traceback, or a command to copy."""
    from markupsafe import escape

    return escape(shown_lines(text))
