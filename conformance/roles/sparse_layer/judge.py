"""The judge of a sparse layer: what it wrote, since a wrong selection explains a wrong output, then its attention."""

from collections.abc import Iterator
from typing import ClassVar

from mla_conformance.driving.driver import Observation
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.verdict import Check, Verdict


class SparseLayerJudge(AttentionJudge):
    """The steps of a sparse layer's verdict."""

    writes: ClassVar = Check.WRITTEN

    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        """Selection and caches, then the output."""
        yield from (self._miswritten(returned) for returned in observation.returned)
        yield from super()._numbers(observation)
