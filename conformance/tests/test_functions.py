"""The end of a pytest run: what is wrong with each function, in few lines."""

import pytest

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.functions import function_lines, simplest

UNWRITTEN = "the last heads are not written"
SAID = (
    "decode: output is 0 at request 0, query 0, head 3, column 1, expected 2, wrong in 1 of 4 heads, first at request 0"
)


def record(case: str, status: Status = Status.FAIL, **said: str) -> Record:
    case = f"decode:call=decode;{case}"
    reported = {"check": "output", "clause": "4.2", "message": f"{SAID} (SPEC 4.2)", **said} if status == "fail" else {}
    return Record("t.py::mine", f"t.py::mine[{case}]", "decode", case, status, **reported)  # type: ignore[arg-type]


FAILING = [record(f"q=[2];kv=[{length}];layers=2", finding=UNWRITTEN) for length in (9, 5, 7)]
PASSING = [record(f"q=[2];kv=[{length}]", Status.PASS) for length in (5, 7)]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_function_is_told_by_cause_with_what_its_failures_have_in_common() -> None:
    assert list(function_lines("t.py::mine", [*PASSING, *FAILING], False)) == [
        "t.py::mine: 3 of 5 cases fail, 1 likely cause",
        "     only with layers=2: 3 such cases fail so, 0 pass",
        f"  1. 3 cases: {UNWRITTEN}",
        "     simplest: decode: output is 0 at request 0, query 0, head 3, column 1,",
        "     expected 2, wrong in 1 of 4 heads",
        "     replay: pytest 't.py::mine[decode:call=decode;q=[2];kv=[5];layers=2]'",
    ]


def test_a_function_that_passes_alone_keeps_something() -> None:
    lines = list(function_lines("t.py::mine", [*PASSING, *FAILING], True))
    assert lines[0] == "t.py::mine: 3 of 5 cases fail" and "passes when run alone" in lines[1]
    assert lines[-1] == "     replay: pytest t.py::mine" and max(map(len, lines)) <= 80
    assert simplest([*PASSING, *FAILING]) == FAILING[1]


def test_the_rest_of_many_causes_is_counted() -> None:
    causes = [record(f"q=[2];kv=[{length}]", explanation=f"mistake {'abcdef'[length]}") for length in range(1, 6)]
    lines = list(function_lines("t.py::mine", causes, False))
    assert lines[0] == "t.py::mine: 5 of 5 cases fail, 5 likely causes" and lines[-1] == "  … and 2 more cases"
    assert sum("replay: " in line for line in lines) == 3 and not any("simplest" in line for line in lines)
