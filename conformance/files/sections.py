"""Sections of hand-written texts that commands write: what stands between ``<!-- NAME:begin -->`` and ``:end``."""

from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.inputs import InputError, read_text
from mla_conformance.files.outputs import write_output


@dataclass(frozen=True)
class Section:
    """The section of a file.

    Attributes:
        path: the file.
        content: what stands between the markers.
    """

    path: Path
    content: str
    _before: str
    _after: str

    @staticmethod
    def of(path: Path, name: str) -> "Section":
        """The section of this name.

        Raises:
            InputError: unreadable, or the file does not hold each marker once, in their order.
        """
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, first, rest = read_text(path).partition(begin)
        content, second, after = rest.partition(end)
        if not first or not second or any(marker in before + content + after for marker in (begin, end)):
            raise InputError(f"{path}: expected {begin} and {end}, once each and in this order")
        return Section(path, content, before + begin, end + after)

    def write(self, content: str) -> None:
        """Put this in the section's place and leave the rest of the file as it was.

        Raises:
            InputError: the file cannot be written.
        """
        write_output(self.path, f"{self._before}\n{content}\n{self._after}")
