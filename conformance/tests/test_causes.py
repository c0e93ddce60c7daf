"""Failures by cause: what is told once, what is kept apart, in which cases it occurs, and how much a terminal shows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.judging.record import UNLIKE, Record, Status
from mla_conformance.report.causes import causes, raised_at
from mla_conformance.report.ci_views import markdown
from mla_conformance.report.outcome import cause_lines, closing_line, outcome_lines
from mla_conformance.tests.reports import run_of, write_run

BASE_2 = "The LSE is in base 2, like someone/something#1"


def failure(case: str = "lse:q=[4]", **changes: object) -> Record:
    reported = {"message": "LSE is 5 (SPEC 4.2)", "check": "lse", "clause": "4.2", "used": {"lse": 9.0}, **changes}
    return Record("B", "b.py:B", case.partition(":")[0], case, Status.FAIL).with_fields(**reported)


def raised(text: str, case: str = "lse:q=[4]") -> Record:
    return failure(case, check="call", clause="3.8", message=f"new tokens: the call raised {text} (SPEC 3.8)", used={})


def test_one_cause_has_its_extent_and_simplest_case_and_a_number_as_replay_takes_it() -> None:
    shares = {"lse:q=[64]": 300.0, "lse:q=[9]": 12.0, "lse:heads=1;q=[2];data=needle": 9.0, "decode:q=[1];kv=[2]": 4.0}
    (cause,) = causes([failure(case, explanation=BASE_2, used={"lse": share}) for case, share in shares.items()])
    assert (cause.sentence, cause.used, cause.capabilities) == (BASE_2, (4.0, 300.0), ("lse", "decode"))
    assert cause.example.case == "lse:q=[9]" and cause.extent == ", 4 to 300 × its budget (SPEC 4.2)"
    first, second = failure(), [failure(f"lse:q=[{tokens}]", check="output") for tokens in (7, 6)]
    both = run_of([first.with_fields(backend="A"), *second, first])
    numbers = [line.split()[0] for line in cause_lines(both, 80) if re.match(r"    \d+\. ", line)]
    assert numbers == ["1.", "2.", "3."] and both.causes[1].example.case == "lse:q=[6]"


def test_other_causes_are_kept_apart() -> None:
    others: list[Any] = [{"finding": "the LSE is transposed"}, {"explanation": "The LSE is rounded to bf16"}]
    others += [{"check": "output"}, {"check": "call", "message": "the call raised ValueError: no"}]
    others += [{"status": Status.CRASH, "check": "", "message": "the process died: Segmentation fault"}]
    for other in others:
        found = causes([failure(), failure("lse:q=[5]"), failure("lse:q=[6]", **other)])
        assert sorted(len(cause.failures) for cause in found) == [1, 2], other


def test_a_finding_joins_what_explains_it_elsewhere_and_a_comparison_in_vain_is_told() -> None:
    finding = "the LSE is in base 2"
    explained = failure("lse:q=[5]", finding=finding, explanation=BASE_2)
    (cause,) = causes([failure(finding=finding), explained, failure("decode:q=[1];kv=[2]", explanation=BASE_2)])
    assert cause.sentence == BASE_2 and len(cause.failures) == 3
    unlike = failure("lse:q=[5]", explanation=UNLIKE)
    assert causes([unlike])[0].sentence == f"the LSE is wrong, {UNLIKE}"
    (cause,) = causes([failure(), unlike, failure("lse:q=[6]")])
    assert cause.sentence == f"the LSE is wrong, {UNLIKE} (1 of 3 cases compared)"


def test_what_is_known_comes_first_and_the_rest_may_be_of_it() -> None:
    base_2, vague = failure("lse:q=[5]", explanation=BASE_2), failure("lse:q=[6]", explanation=f"perhaps {BASE_2}")
    exceptions = [raised("ValueError: no", f"lse:q=[{tokens}]") for tokens in (7, 8, 9)]
    found = causes([failure(), failure("lse:q=[3]"), vague, base_2, *exceptions])
    kinds = [(cause.kind, len(cause.failures)) for cause in found]
    assert kinds == [("likely", 1), ("seen", 3), ("further", 2), ("further", 1)]
    lines = list(cause_lines(run_of([failure(), failure("lse:q=[3]"), base_2]), 140))
    assert lines[0] == "wrong: B, 1 likely cause, 2 more cases" and lines[1].startswith(f"    1. 1 case: {BASE_2}")
    assert any("2. 2 more cases, possibly the same bug: the LSE is wrong" in line for line in lines)
    assert "**B · 2 more cases**, possibly the same bug" in markdown(run_of([failure(), failure("lse:q=[3]"), base_2]))


def test_what_is_declared_unsupported_and_runs_comes_last() -> None:
    message = "declared unsupported (dtype fp64), but it ran and returned a {} result (SPEC 3.8)"
    wrong = {"check": "unsafe_refusal", "message": message.format("wrong"), "used": {}}
    accepted = [failure(f"refusals:q=[{tokens}]", **wrong) for tokens in (3, 4)]
    right = failure("refusals:q=[5]", check="undeclared_support", message=message.format("right"), used={})
    found = causes([right, *accepted, failure(), failure("lse:q=[5]", explanation=BASE_2)])
    said = "accepts a configuration it declares unsupported, and returns a {} result"
    assert [cause.sentence for cause in found[2:]] == [said.format("wrong"), said.format("right")]
    assert [cause.kind for cause in found] == ["likely", "further", "seen", "seen"]


def test_what_fails_in_the_suite_itself_is_not_told_of_the_kernel(tmp_path: Path, refused: Any) -> None:
    fault = raised("the suite itself failed (please report it), not the kernel: KeyError: 'q'")
    fault = fault.with_fields(status=Status.HARNESS_ERROR, check="")
    head = next(cause_lines(run_of([fault]), 140))
    assert head.startswith("not judged: ") and "the suite itself failed" in head
    assert run_of([fault]).exit_status == 1 and closing_line(run_of([fault])).startswith("1 backend incomplete · ")
    assert next(cause_lines(run_of([fault, failure("lse:q=[3]")]), 140)).startswith("wrong: ")
    assert "| B | ⚪ unavailable |" in markdown(run_of([fault])) and "| B | ❌ fail |" in markdown(run_of([failure()]))
    report = write_run(tmp_path / "report.json", [fault])
    said = refused("export", "--issue", report)
    assert "failure 1: expected a kernel's failure" in said and "the suite itself failed" in said


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("RuntimeError: no page of 16 at 0x7fa0", "RuntimeError: no page of 64 at 0x11b0", True),
        ("OSError: /home/a/libfast.so: cannot open", "OSError: /opt/libfast.so: cannot open", True),
        ("RuntimeError: does not support paged KV", "ModuleNotFoundError: No module named 'x'", False),
    ],
)
def test_exceptions_are_grouped_by_their_text(one: str, other: str, alike: bool) -> None:
    found = causes([raised(one), raised(other, "decode:q=[1];kv=[500]")])
    assert (len(found) == 1) is alike and found[0].sentence == one
    head, replay = cause_lines(run_of([raised(one)]), 80)  # which says it once
    assert head == f"wrong: B, 1 case: {one} (SPEC 3.8)" and "replay: " in replay


def test_a_terminal_shows_seven_causes_at_most_and_reasons_where_one_kernel_is_asked_for() -> None:
    records = [failure(f"lse:q=[{n}]", explanation=f"mistake number {'x' * n} of a kernel") for n in range(1, 10)]
    lines = list(cause_lines(run_of([*records, failure("lse:q=[64]", explanation=records[0].explanation)]), 80))
    assert lines[0] == "wrong: B, 9 likely causes, 10 cases" and lines[-1] == "    … and 2 more cases in the report"
    assert lines[1].startswith("    1. 2 cases: mistake number x of a kernel, 9 × its budget (SPEC 4.2)")
    assert sum("replay: mla-conformance replay" in line for line in lines) == 7
    assert all(len(line) <= 80 for line in lines if "replay:" not in line)
    refused = [failure(f"lse:q=[{n}]", message=f"no {n % 2}", check="") for n in range(3, 10)]
    refused = [each.with_fields(status=Status.UNSUPPORTED) for each in refused]
    lines = list(outcome_lines(run_of(refused), 140))
    assert "  4 cases unsupported: no 1" in lines and "  3 cases unsupported: no 0" in lines
    two = replace(run_of(refused), backends=run_of(refused).backends * 2)
    assert not any("no 1" in line for line in outcome_lines(two, 140))


TRACEBACK = """Traceback (most recent call last):
  File "/lib/conformance/driving/executor.py", line 100, in run_step
    value = step()
  File "/home/me/{file}", line 12, in run_decode
    return launch(q)
  File "/lib/torch/_ops.py", line 7, in __call__
    raise ValueError("no page of 16")
"""


def test_an_exception_says_which_line_of_the_kernels_own_code_raised() -> None:
    own = failure(check="call", message="the call raised ValueError: no", detail=TRACEBACK.format(file="b.py"), used={})
    assert raised_at(own) == "raised at /home/me/b.py:12, in run_decode"
    other = raised_at(failure(check="call", detail=TRACEBACK.format(file="c.py")))
    assert other.endswith("/lib/torch/_ops.py:7, in __call__")
    assert any("raised at /home/me/b.py:12, in run_decode" in line for line in cause_lines(run_of([own]), 140))
    assert "raised at /home/me/b.py:12, in run\\_decode" in markdown(run_of([own]))
    assert raised_at(raised("ValueError: no")) == raised_at(failure(detail=TRACEBACK)) == ""


def test_a_long_history_is_replayed_by_the_report() -> None:
    history = tuple(f"lse:q=[{tokens}]" for tokens in range(10, 20))
    first, after = failure("lse:q=[3]"), failure("decode:q=[1];kv=[2]", confirmation="after", after=history)
    kept = replace(run_of([first, after]), source="run one/report.json")
    (line,) = (line for line in cause_lines(kept, 80) if "--failure" in line)
    number = int(line.rpartition(" ")[2])
    assert line.strip() == f"replay: mla-conformance replay --report 'run one/report.json' --failure {number}"
    assert kept.causes[number - 1].example == after
    assert any(line.count("--after") == 10 for line in cause_lines(run_of([first, after]), 80))  # no report is kept


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
        (CODES[:2], PLAIN, ""),  # two failures
        (CODES, [], ""),  # nothing to tell them from
        (PLAIN, [f"q=[1];kv=[{length}]" for length in range(20, 30)], ""),  # most such cases pass
        (CODES, [CODES[0], *PLAIN[:2]], ""),  # a third of what passes
        ([CODES[0], PLAIN[0], "q=[3];kv=[9];page=32"], [SEVERAL[0], "cache=fp8;q=[1];kv=[9];page=32"], ""),
    ],
)
def test_the_kind_of_failing_cases_is_told_with_its_number(failing: list[str], passing: list[str], said: str) -> None:
    records = [failure(f"decode:call=decode;{case}", check="output") for case in failing]
    passed = {"status": Status.PASS, "check": "", "message": ""}
    (cause,) = causes([*records, *(failure(f"decode:call=decode;{case}", **passed) for case in passing)])
    assert cause.only == said
