"""Exploration: cases that are drawn instead of listed; collected with ``--mla-explore N`` only."""

import pytest

from mla_conformance.execute import failing
from mla_conformance.explore import Exploration
from mla_conformance.verdict import Nonconformance, Status


@pytest.mark.explore
def test_explore(exploration: Exploration) -> None:
    verdict = exploration.search()
    if verdict.status is Status.UNSUPPORTED:
        pytest.skip(f"{exploration.subject.name} unsupported: {verdict.message}")
    if failing(verdict):
        raise Nonconformance(verdict)
