"""The scoreboard as files: a page, a badge for each kernel, and its failures as SARIF."""

from pathlib import Path

from mla_conformance.certificate.submission import folder_of
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.report.json_report import to_text
from mla_conformance.scoreboard.badge import badge
from mla_conformance.scoreboard.board import Board
from mla_conformance.scoreboard.page import page
from mla_conformance.scoreboard.sarif import sarif


def write_site(board: Board, out: Path) -> None:
    """Write ``index.html``, ``scoreboard.sarif`` and ``badges/KERNEL.svg``.

    Raises:
        InputError: a file cannot be written, or two kernels would share one.
    """
    badges = _badges(board)
    for name, text in badges.items():
        write_output(out / "badges" / name, text)
    write_output(out / "scoreboard.sarif", to_text(sarif(board.newest)))
    write_output(out / "index.html", page(board))


def _badges(board: Board) -> dict[str, str]:
    """By the name of the file, which is that of the kernel's folder among submissions."""
    found: dict[str, str] = {}
    for kernel, entry in board.by_kernel.items():
        name = f"{folder_of('', kernel).name or 'kernel'}.svg"
        if name in found:
            raise InputError(f"{kernel}: expected another name, a second kernel has the badge {name}")
        found[name] = badge(entry)
    return found
