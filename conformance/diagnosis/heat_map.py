"""Where the errors of a failure are, by head and row, as plain data. No torch: it travels."""

from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.judging.record import ARITHMETIC, Record

MOST = 64  # heads, and rows, that a map tells apart
BEYOND = 9
_BLOCKS = "·▁▂▃▄▅▆▇██"  # by digit

# In Python a line's end may stand behind what matches `$`.
_Digits = Annotated[str, Meta(pattern=r"^[0-9]{1,64}$(?!\n)")]
_Size = Annotated[int, Meta(ge=1, le=2**53)]


class HeatMap(Struct, frozen=True, forbid_unknown_fields=True):
    """How far an output or an LSE is over its budget; of several heads or rows in a cell the largest counts.

    Attributes:
        part: what was compared, such as "LSE of new tokens".
        heads: heads that the lines stand for.
        rows: judged rows of the batch that the digits of a line stand for.
        lines: a line for each head, up to 64, with a digit for each row, up to 64: 0 is within the budget, n above it
            and at most 10^n times it, 9 that or anything beyond, NaN included.

    Raises:
        ValueError: the lines have not the form that so many heads and rows have.
    """

    part: str
    heads: _Size
    rows: _Size
    lines: Annotated[tuple[_Digits, ...], Meta(min_length=1, max_length=MOST)]

    def __post_init__(self) -> None:
        down, right = min(self.heads, MOST), min(self.rows, MOST)
        if list(map(len, self.lines)) != [right] * down:
            raise ValueError(f"expected {down} lines of {right} digits for {self.heads} heads and {self.rows} rows")

    @property
    def cells(self) -> int:
        return sum(map(len, self.lines))

    @property
    def wrong(self) -> int:
        return self.cells - sum(line.count("0") for line in self.lines)

    def curves(self, width: int) -> dict[str, str]:
        """The largest error by row and by head, from the first to the last, as lines of at most ``width`` blocks.

        A dot is within the budget, and each step of a block ten times further beyond it. None where there is one alone.
        """
        curves = {}
        for name, cells in (("by row", list(zip(*self.lines, strict=True))), ("by head", list(self.lines))):
            if len(cells) > 1:
                worst, together = [max(map(int, each)) for each in cells], -(-len(cells) // width)
                blocks = (_BLOCKS[max(worst[at : at + together])] for at in range(0, len(worst), together))
                curves[name] = "".join(blocks)
        return curves


def is_mapped(record: Record) -> bool:
    return record.failed and record.check in ARITHMETIC
