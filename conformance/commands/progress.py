"""How far a run is: one live line on a terminal, and now and then a line of its own anywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mla_conformance.judging.record import Record
from mla_conformance.report.terminal import say, shown

_PER_SECOND = 4


class Progress:
    """Counts what is judged; failures are told by their causes, at the end.

    Attributes:
        total: records that are expected, each case with each backend.
        done: records so far.
        failed: how many of them failed.
        parts: lines of a whole run where no line is live.
    """

    def __init__(self, total: int, done: int = 0, failed: int = 0, parts: int = 10) -> None:
        self.total, self.done, self.failed, self.parts = total, done, failed, parts
        self._before, self._began, self._now = done, time.monotonic(), ""

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if record.confirmation or record.is_explained:
            return  # it was counted when it was judged first
        self.done += 1
        self.failed += record.failed
        self._now = f"{record.backend} {record.capability}"
        if not is_live() and self._part(self.done) > self._part(self.done - 1):
            say(f"… {self.line}")

    def phase(self, what: str) -> None:
        """Tell what goes on once everything is judged."""
        self._now = what
        if self.parts and not is_live():
            say(f"… {self.line}")

    def _part(self, done: int) -> int:
        return done * self.parts // max(1, self.total)

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def line(self) -> str:
        """Judged of all, failed, time since it began, what is left of it at this rate, and what goes on."""
        return " · ".join(
            filter(None, (f"{self.done}/{self.total} judged", f"{self.failed} failed", *self._times(), self._now))
        )

    def _times(self) -> Iterator[str]:
        elapsed, judged = self.elapsed, self.done - self._before
        yield clock(elapsed)
        if judged and self.done < self.total:
            yield f"about {clock(elapsed * (self.total - self.done) / judged)} left"


def clock(seconds: float) -> str:
    """A time as m:ss, from an hour on as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def is_live() -> bool:
    """Whether a line may be drawn anew: on a terminal that can, and not in the log of a CI job that has one."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and "CI" not in os.environ


@contextmanager
def live(line: Callable[[], str]) -> Iterator[None]:
    """Show a line, kept up to date and gone at the end; nothing where no line is live."""
    if not is_live():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text(shown(line()), style="dim", no_wrap=True, overflow="ellipsis")

    console = Console(file=sys.stdout, highlight=False)
    with Live(
        console=console,
        get_renderable=drawn,
        refresh_per_second=_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield
