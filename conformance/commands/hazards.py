"""``capabilities --spec``: the hazards of the SPEC, written from the table and the case lists."""

from pathlib import Path

from mla_conformance.files.sections import Section
from mla_conformance.vocabulary.spec_facts import section_lines


def write_hazards(spec: Path) -> int:
    """Write them between the markers of a file; the exit status."""
    Section.of(spec, "hazards").write("\n".join(section_lines()))
    return 0
