"""Pages for the states of tokens, as an engine deals them out: what no group needs any longer is dealt out again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mla_conformance.roles.compress.case import CompressCase

Columns = Mapping[int, int]
"""The page of each column of a request's table that has one."""


@dataclass
class StatePages:
    """Pages by number, from 0 on.

    Attributes:
        case: whose calls.
        count: pages that were ever needed.
    """

    case: CompressCase
    count: int = 0
    _free: list[int] = field(default_factory=list)
    _held: dict[int, dict[int, int]] = field(default_factory=dict)

    def tables(self) -> Iterator[dict[int, Columns]]:
        """The columns of each request of each call."""
        for step in self.case.steps():
            yield {request: dict(self._columns(request, tokens)) for request, tokens in step.items()}
            self._free += [
                page for request in step if self._is_done(request, step) for page in self._drop(request, None)
            ]

    def _columns(self, request: int, tokens: range) -> Columns:
        first = max(0, tokens.start // self.case.ratio - self.case.overlap) * self.case.ratio // self.case.state_page
        held = self._held.setdefault(request, {})
        self._free += self._drop(request, first)
        for column in range(first, (tokens.stop - 1) // self.case.state_page + 1):
            if column not in held:
                held[column] = self._page()
        return held

    def _page(self) -> int:
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def _drop(self, request: int, first: int | None) -> list[int]:
        """The pages of a request before a column, or all of them, which it gives back."""
        held = self._held[request]
        return [held.pop(column) for column in sorted(held) if first is None or column < first]

    def _is_done(self, request: int, step: Mapping[int, range]) -> bool:
        return step[request].stop == self.case.totals[request]
