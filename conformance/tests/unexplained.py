"""Runs whose failures are not compared with all that is known, which takes seconds: for tests of other things."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def unexplained() -> Iterator[None]:
    """Meanwhile no run of this process explains a failure; each is judged again all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_conformance.engine.run.MOST_EXPLAINED", 0)
        yield
