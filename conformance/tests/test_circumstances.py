"""In which kind of cases failures are said to occur, and where nothing is said."""

from collections.abc import Iterable

import pytest

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.report.causes import causes


def record(case: str, status: Status) -> Record:
    message, check = ("decode: output is wrong", Check.OUTPUT) if status is Status.FAIL else ("", "")
    return Record("K", "m:K", case.partition(":")[0], case, status, message=message, check=check)


def only(failing: Iterable[str], passing: Iterable[str]) -> str:
    """What is said of the one cause of these failures."""
    outcomes = [(Status.FAIL, failing), (Status.PASS, passing)]
    (cause,) = causes([record(f"decode:call=decode;{case}", status) for status, cases in outcomes for case in cases])
    return cause.only


CODES = [f"cache=fp8;q=[1];kv=[{length}]" for length in (5, 6, 7)]
PLAIN = [f"q=[1];kv=[{length}]" for length in (5, 6, 7)]
SEVERAL = [f"q=[2];kv=[{length}]" for length in (5, 6, 7)]
LONG = [f"q=[1];kv=[{length}]" for length in (399, 1000, 500)]
WIDE = [f"heads={heads};q=[1];kv=[5]" for heads in (20, 40, 24)]
BOTH = [f"cache=fp8;q=[2];kv=[{length}]" for length in (5, 6, 7)]


@pytest.mark.parametrize(
    ("failing", "passing", "said"),
    [
        (CODES, PLAIN, "only with cache=fp8: 3 such cases fail so, 0 pass"),
        (CODES[:2] + BOTH, [*PLAIN, CODES[2]], "only with cache=fp8: 5 such cases fail so, 1 pass"),
        (SEVERAL, PLAIN, "only with several query tokens: 3 such cases fail so, 0 pass"),
        (LONG, PLAIN, "only with 400 keys or more: 3 such cases fail so, 0 pass"),
        (WIDE, PLAIN, "only with 20 heads or more: 3 such cases fail so, 0 pass"),
        (BOTH, CODES + SEVERAL + PLAIN, "only with cache=fp8 and several query tokens: 3 such cases fail so, 0 pass"),
    ],
)
def test_the_kind_of_failing_cases_is_told_with_its_number(failing: list[str], passing: list[str], said: str) -> None:
    assert only(failing, passing) == said


@pytest.mark.parametrize(
    ("failing", "passing"),
    [
        (CODES[:2], PLAIN),  # two failures
        (CODES, []),  # nothing to tell them from
        (PLAIN, [f"q=[1];kv=[{length}]" for length in range(20, 30)]),  # most such cases pass
        (CODES, [CODES[0], *PLAIN[:2]]),  # a third of what passes
        ([CODES[0], PLAIN[0], "q=[3];kv=[9];page=32"], [SEVERAL[0], "cache=fp8;q=[1];kv=[9];page=32"]),
    ],
)
def test_what_tells_failures_from_nothing_is_not_told(failing: list[str], passing: list[str]) -> None:
    assert only(failing, passing) == ""
