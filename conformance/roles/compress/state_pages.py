"""Pages for the states of tokens, as an engine deals them out: what no group needs any longer is dealt out again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mla_conformance.roles.compress.case import CompressCase

Columns = Mapping[int, int]
"""The page of each column of a request's table that has one."""


@dataclass
class StatePages:
    """Pages by number, from 0 on."""

    case: CompressCase  # whose calls
    count: int = 0  # pages that were ever needed
    _free: list[int] = field(default_factory=list)
    _held: dict[int, dict[int, int]] = field(default_factory=dict)

    def tables(self) -> Iterator[dict[int, Columns]]:
        """The columns of each request of each call; all give back what they do not need before any gets another."""
        for step in self.case.steps():
            for request, tokens in reversed(step.items()):  # so that the first one gets the last one's
                self._give_back(request, self._first(tokens))
            yield {request: dict(self._columns(request, tokens)) for request, tokens in step.items()}
            for request, tokens in step.items():
                if tokens.stop == self.case.totals[request]:
                    self._give_back(request, tokens.stop)

    def _first(self, tokens: range) -> int:
        """The first column that groups need which are not complete before these tokens, or the group before them."""
        group = max(0, tokens.start // self.case.ratio - self.case.overlap)
        return group * self.case.ratio // self.case.state_page

    def _columns(self, request: int, tokens: range) -> Columns:
        held = self._held[request]
        for column in range(self._first(tokens), (tokens.stop - 1) // self.case.state_page + 1):
            if column not in held:
                held[column] = self._page()
        return held

    def _page(self) -> int:
        """The one that was given back first, else a new one."""
        if self._free:
            return self._free.pop(0)
        self.count += 1
        return self.count - 1

    def _give_back(self, request: int, first: int) -> None:
        """The pages of a request before a column."""
        held = self._held.setdefault(request, {})
        self._free += [held.pop(column) for column in sorted(held) if column < first]
