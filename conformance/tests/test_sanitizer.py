"""What compute-sanitizer 2025.3.1 wrote on an H200 of kernels with planted errors, with fewer threads and frames."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.references import BackendReference
from mla_conformance.cli import main
from mla_conformance.commands.sanitize import lines
from mla_conformance.traits.sanitizer import Sanitized, SanitizerError, UnreadableOutput, errors_of, sanitized

CASE = "memory_bounds:dims=small;heads=1;q=[5]"


def output(*records: str) -> str:
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<ComputeSanitizerOutput>{"".join(records)}</ComputeSanitizerOutput>'
    )


WROTE = Path(__file__).with_name("sanitizer")
SAMPLES = {
    "memcheck": (
        "oob", "Invalid __global__ write of size 4 bytes is out of bounds", 2, "/src/bad.cu:3", "",
    ),
    "racecheck": ("race", "Race condition (write in line 4, read)", 1, "/src/bad.cu:4", ""),
    "initcheck": ("uninit", "Uninitialized __global__ memory read of size 4 bytes", 2, "/src/bad.cu:5", ""),
    "synccheck": ("diverge", "Barrier error Divergent thread(s) in warp", 2, "/src/bad.cu:6", ""),
    "triton": (
        "_load", "Invalid __global__ read of size 1 bytes is out of bounds", 2, "/src/oob.py:9", "/src/oob.py:21",
    ),
}  # fmt: skip
TORCHS = (
    "<record><kind>{}</kind><what><text>Bad</text></what><where><func>void at::native::fill</func></where></record>"
)
HOST = "<record><kind>Api</kind><what><api>cudaMemcpy</api><result>700</result></what></record>"


def wrote(name: str) -> str:
    return WROTE.joinpath(f"{name}.xml").read_text("utf-8")


@pytest.mark.parametrize("tool", SAMPLES)
def test_errors_are_grouped_by_kernel_and_cause(tool: str) -> None:
    assert errors_of(wrote(tool)) == (SanitizerError(*SAMPLES[tool]),)


def test_an_error_of_the_host_counts_where_no_kernel_has_one() -> None:
    assert [(each.kernel, each.cause) for each in errors_of(output(HOST))] == [("cudaMemcpy", "700")]


def test_torchs_kernels_count_in_memcheck_alone() -> None:
    assert errors_of(output(TORCHS.format("Initcheck"))) == ()
    assert [each.kernel for each in errors_of(output(TORCHS.format("Precise")))] == ["void at::native::fill"]


def test_no_record_is_no_error() -> None:
    assert errors_of(output()) == ()


@pytest.mark.parametrize(
    "text", ["", "<ComputeSanitizerOutput><record>", "<html/>", "========= ERROR SUMMARY: 0 errors"]
)
def test_what_is_no_output_is_never_taken_for_a_clean_one(text: str) -> None:
    with pytest.raises(UnreadableOutput, match="expected XML"):
        errors_of(text)


def tool(folder: Path, written: str | None, runs: bool = True, status: int = 0) -> str:
    """A program that stands for the tool: it writes this output, and runs what it is given or does not."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nargs = sys.argv[1:]\n"
        f"written = {written!r}\n"
        "if written is not None: open(args[args.index('--save') + 1], 'w').write(written)\n"
        f"if {runs}: subprocess.run(args[args.index({sys.executable!r}):], check=True)\n"
        f"print('Error: not attached' if {status} else '')\nsys.exit({status})\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((None, False, 1), "wrote no output"),
        ((output(), False, 0), "not made under it"),
        ((output(), True, 3), "not made under it; exit status 3: Error: not attached"),
        (("<x/>", True, 0), "expected XML"),
    ],
)
def test_a_tool_that_cannot_watch_is_unavailable(tmp_path: Path, arguments: Any, why: str) -> None:
    found = sanitized(tool(tmp_path, *arguments), "memcheck", "EAGER", CASE, "cpu", 120)
    assert why in found.unavailable and not found.errors


def test_a_call_that_was_watched_and_is_clean(tmp_path: Path) -> None:
    assert sanitized(tool(tmp_path, output()), "memcheck", "EAGER", CASE, "cpu", 120) == Sanitized(CASE)


def test_errors_count_although_the_process_ended_badly(tmp_path: Path) -> None:
    found = sanitized(tool(tmp_path, wrote("memcheck"), False, 1), "memcheck", "EAGER", CASE, "cpu", 120)
    assert [each.count for each in found.errors] == [2] and not found.unavailable


def test_the_lines_name_kernel_cause_and_replay_and_what_says_nothing() -> None:
    error = SanitizerError("decode", "Invalid read", 2, "mla.cu:40", "mine.py:7")
    found = [Sanitized("lse:q=[4]", (error,)), Sanitized("lse:q=[8]", (error,)), Sanitized("lse:q=[9]", (), "too slow")]
    said = list(lines("memcheck", BackendReference("MINE", "a.py:MINE"), found))
    assert said[0] == "memcheck MINE: decode: Invalid read, 4 times, mla.cu:40, launched at mine.py:7"
    assert said[1] == "  replay: mla-conformance replay 'lse:q=[4]' --backend a.py:MINE"
    assert "unavailable for 1 case, such as lse:q=[9]: too slow" in said[2] and "nothing reported of 0 cases" in said[3]


def test_without_the_tool_the_command_says_so_and_nothing_passed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert main(["certify", "--backend", "EAGER", "--sanitize", "racecheck"]) == 3
    assert "racecheck unavailable: compute-sanitizer is not installed here" in capsys.readouterr().out
