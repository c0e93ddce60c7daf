"""Exploration: cases that are drawn instead of listed; collected with ``--mla-explore N`` only."""

import pytest

from mla_conformance.judging.verdict import Nonconformance, Status
from mla_conformance.trials.execute import failing
from mla_conformance.trials.explore import Exploration


@pytest.mark.explore
def test_explore(exploration: Exploration) -> None:
    verdict = exploration.search()
    if verdict.status is Status.UNSUPPORTED:
        pytest.skip(f"{exploration.subject.name} unsupported: {verdict.message}")
    if failing(verdict):
        raise Nonconformance(verdict)
