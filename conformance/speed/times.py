"""Times of a kernel as data, and the table of several. No torch.

They come from a process that the kernel's code shares, so that they are the library's own word; texts and numbers in
them are bounded as everything that such a process says.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

_Text = Annotated[str, Meta(max_length=10_000)]
_Figure = Annotated[float, Meta(ge=0, le=1e15)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_KINDS = ("decode", "prefill", "sparse decode", "sparse prefill")
_UNITS = ("µs", "ms", "s")


class Interval(Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of a call: the median of the medians of several rounds, the least and the greatest of these."""

    median: _Figure
    low: _Figure
    high: _Figure

    def __str__(self) -> str:
        value, spread, unit = float(f"{self.median:.3g}"), (self.high - self.low) / 2, 0
        while value >= 1000 and unit + 1 < len(_UNITS):
            value, spread, unit = value / 1000, spread / 1000, unit + 1
        return f"{value:.3g} {_UNITS[unit]} ± {float(f'{spread:.2g}'):g}"


class Timed(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shape of one kernel.

    Attributes:
        kind: decode, prefill, sparse decode or sparse prefill.
        shape: in words.
        case: id of the case that has the shape; empty where the kernel supports no such case.
        called: the call alone, without a graph.
        graph: the same as a CUDA graph; None where it is not declared that one can be captured.
        planning: what is handed over and planned before the call, by the clock.
        workspace: bytes that torch allocated for instance, plan and call beside the result; None where nobody counts.
        moved: bytes of operands and results that are read or written once.
        operations: useful ones.
        share: what the card would take at least, by bytes or by operations, of the shorter time.
        why: why there is no time, or no graph.
    """

    kind: _Text
    shape: _Text
    case: Annotated[str, Meta(max_length=20_000)] = ""
    called: Interval | None = None
    graph: Interval | None = None
    planning: Interval | None = None
    workspace: _Count | None = None
    moved: _Count = 0
    operations: _Figure = 0.0
    share: _Figure = 0.0
    why: _Text = ""

    @property
    def best(self) -> Interval | None:
        """As a graph where there is one: so engines run it."""
        return self.graph or self.called

    @property
    def rate(self) -> str:
        """What is reached, in words."""
        if not self.best or not self.best.median:
            return ""
        bandwidth, operations = self.moved / self.best.median / 1e3, self.operations / self.best.median / 1e6
        return f"{_figure(bandwidth)} GB/s, {_figure(operations)} TFLOP/s"


def _figure(value: float) -> str:
    """Three digits that count."""
    return f"{float(f'{value:.3g}'):,g}"


class Speed(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was timed of one backend.

    Attributes:
        times: in the order of the shapes.
        timer: what took them, in words.
        copy: GB/s, read and written, of a copy on the same device in the same process.
        product: TFLOP/s of a product of bf16 matrices there, on a CPU of float32 ones.
        clocks: what was seen of clocks and throttling, in words.
        why: why nothing was timed; empty where something was.
    """

    times: Annotated[tuple[Timed, ...], Meta(max_length=100)] = ()
    timer: _Text = ""
    copy: _Figure = 0.0
    product: _Figure = 0.0
    clocks: _Text = ""
    why: _Text = ""

    def of(self, shape: str) -> Timed | None:
        return next((each for each in self.times if each.shape == shape and each.best), None)

    @property
    def has_times(self) -> bool:
        return any(each.best for each in self.times)

    @property
    def reason(self) -> str:
        """Why there is no time at all, in words."""
        return self.why or next((each.why for each in self.times if each.why), "none of its shapes is supported")


Kernels = Sequence[tuple[str, Speed]]


def columns_of(kernels: Kernels) -> list[str]:
    """Of each kind the shape that most kernels have; the first two kinds, and more until every kernel has one."""
    timed = [(each.kind, each.shape) for _, speed in kernels for each in speed.times if each.best]
    common: dict[str, str] = {}
    for (kind, shape), _ in Counter(timed).most_common():
        common.setdefault(kind, shape)
    having = {kind: [speed for _, speed in kernels if speed.of(shape)] for kind, shape in common.items()}
    columns, left = list[str](), [speed for _, speed in kernels if speed.has_times]
    for kind in sorted(common, key=lambda kind: (-len(having[kind]), _KINDS.index(kind))):
        if len(columns) < 2 or left:
            columns.append(common[kind])
            left = [speed for speed in left if not speed.of(common[kind])]
    return columns


def table_of(kernels: Kernels) -> list[tuple[str, ...]]:
    """Rows of kernels that have times, fastest first, with the head before them; empty without one."""
    columns = columns_of(kernels)

    def place(kernel: tuple[str, Speed]) -> list[tuple[bool, float]]:
        found = [kernel[1].of(shape) for shape in columns]
        return [(each is None, each.best.median if each and each.best else 0.0) for each in found]

    rows = [("right, fastest first", *columns, "of the card")] if columns else []
    for name, speed in sorted((each for each in kernels if any(map(each[1].of, columns))), key=place):
        found = [speed.of(shape) for shape in columns]
        share = next(each.share for each in found if each)
        rows.append((name, *(str(each.best) if each else "–" for each in found), f"{100 * share:.0f} %"))
    return rows


def remarks_of(kernels: Kernels) -> list[str]:
    """What stands under the table: how times were taken, what the device reaches, and who has none."""
    timed = [speed for _, speed in kernels if speed.has_times]
    remarks = list(dict.fromkeys(speed.timer for speed in timed))
    if timed:
        copy, product = max(speed.copy for speed in timed), max(speed.product for speed in timed)
        reached = f"{_figure(copy)} GB/s by a device copy, {_figure(product)} TFLOP/s by a matrix product"
        remarks.append(f"the card reaches {reached}, in the same processes; times are what these report")
        remarks += dict.fromkeys(speed.clocks for speed in timed)
    return remarks + [f"no time for {name}: {speed.reason}" for name, speed in kernels if speed not in timed]
