"""Pages from templates: everything in them escaped, with one look that ``look.html.j2`` of this room holds."""

from typing import Any


def render(room: str, template: str, **values: Any) -> str:
    """A page.

    Args:
        room: package that holds the template; what it includes may stand in this room as well.
        template: name of its file.
        values: what it shows; a name that is missing is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(package, ".") for package in (room, "mla_conformance.report")])
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)
