"""The standard streams around a call: what it finds in their place, and whether it left them."""

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TextIO

_STANDARD = (1, 2)


@dataclass(frozen=True)
class StandardStreams:
    """The streams at one moment.

    Attributes:
        streams: ``sys.stdout`` and ``sys.stderr``.
        stand_ins: what a call finds in their place, since pytest itself still writes to the streams.
        descriptors: duplicates of the descriptors 1 and 2.
    """

    streams: tuple[TextIO, TextIO]
    stand_ins: tuple[TextIO, ...]
    descriptors: tuple[int, ...]

    @staticmethod
    def replaced() -> "StandardStreams":
        """Put stand-ins into their place."""
        descriptors = tuple(os.dup(number) for number in _STANDARD)
        streams = (sys.stdout, sys.stderr)
        stand_ins = tuple(os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace") for number in _STANDARD)
        sys.stdout, sys.stderr = stand_ins
        return StandardStreams(streams, stand_ins, descriptors)

    def settle(self) -> str:
        """Put the streams back, and tell whether one was closed or redirected."""
        kept = all(map(_same_file, self.descriptors, _STANDARD)) and not any(x.closed for x in self.stand_ins)
        for descriptor, number, stand_in in zip(self.descriptors, _STANDARD, self.stand_ins, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
            with contextlib.suppress(OSError):  # a call closed the file below it
                stand_in.close()
        sys.stdout, sys.stderr = self.streams
        return "" if kept else "a standard stream"


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
