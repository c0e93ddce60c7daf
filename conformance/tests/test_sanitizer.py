"""What compute-sanitizer 2025.3.1 wrote on an H200 of kernels with planted errors, with fewer threads and frames."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.references import BackendReference
from mla_conformance.commands.certify import lines
from mla_conformance.traits import sanitizer
from mla_conformance.traits.sanitizer import Sanitized, SanitizerError, Tool, ToolUnavailable, Watch, errors_of

CASE, OTHER = "memory_bounds:dims=small;heads=1;q=[5]", "memory_bounds:dims=small;heads=1;q=[6]"
DECODE = "memory_bounds:call=decode;dims=small;heads=1;q=[1];kv=[5]"


def output(*records: str) -> str:
    return f'<?xml version="1.0"?>\n<ComputeSanitizerOutput>{"".join(records)}</ComputeSanitizerOutput>'


OUTSIDE = "Invalid __global__ {} of size {} bytes is out of bounds"
SAMPLES = {
    "memcheck": ("oob", OUTSIDE.format("write", 4), 2, "/src/bad.cu:3", ""),
    "racecheck": ("race", "Race condition (write in line 4, read)", 1, "/src/bad.cu:4", ""),
    "initcheck": ("uninit", "Uninitialized __global__ memory read of size 4 bytes", 2, "/src/bad.cu:5", ""),
    "synccheck": ("diverge", "Barrier error Divergent thread(s) in warp", 2, "/src/bad.cu:6", ""),
    "triton": ("_load", OUTSIDE.format("read", 1), 2, "/src/oob.py:9", "/src/oob.py:21"),
}
_FILL = "<where><func>void at::native::fill</func></where>"
TORCHS = f"<record><kind>{{}}</kind><what><text>Bad</text></what>{_FILL}</record>"
HOST = "<record><kind>Api</kind><what><api>cudaMemcpy</api><result>700</result></what></record>"


def wrote(name: str) -> str:
    return Path(__file__).with_name("sanitizer").joinpath(f"{name}.xml").read_text("utf-8")


@pytest.mark.parametrize("tool", SAMPLES)
def test_errors_are_grouped_by_kernel_and_cause(tool: str) -> None:
    assert errors_of(wrote(tool)) == (SanitizerError(*SAMPLES[tool]),)


def test_what_counts_where_no_kernel_of_the_backend_has_an_error() -> None:
    """Not a refusal that libraries handle."""
    for said in (
        'CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuGetProcAddress',
        'cudaErrorMemoryAllocation (error 2) due to "out of memory" on CUDA API call to cudaMalloc.',
    ):
        record = f"<record><kind>Api</kind><what><text>Program hit {said}</text><api>cuda</api></what></record>"
        assert [each.kernel for each in errors_of(output(record, HOST))] == ["cudaMemcpy"]
    assert errors_of(output()) == errors_of(output(TORCHS.format("Initcheck"))) == ()
    assert [each.kernel for each in errors_of(output(TORCHS.format("Precise")))] == ["void at::native::fill"]
    assert [(each.kernel, each.cause) for each in errors_of(output(HOST))] == [("cudaMemcpy", "700")]


@pytest.mark.parametrize("text", ["", "<ComputeSanitizerOutput><record>", "<html/>", "ERROR SUMMARY: 0 errors"])
def test_what_is_no_output_is_never_taken_for_a_clean_one(text: str) -> None:
    with pytest.raises(sanitizer.UnreadableOutput, match="expected XML"):
        errors_of(text)


VERSION = """#!{python}
import subprocess, sys
args = sys.argv[1:]
if args == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1) (public-release)")
    sys.exit()
open(args[args.index("--save") + 1], "w").write({output!r})
subprocess.run(args[args.index({python!r}):], check=True)
"""


def tool(folder: Path) -> str:
    """A program that stands for the tool: it runs what it is to, of which it writes an output without errors."""
    path = folder / "compute-sanitizer"
    path.write_text(VERSION.format(python=sys.executable, output=output()))
    path.chmod(0o755)
    return str(path)


def watch(reference: str = "EAGER") -> Watch:
    return Watch(Tool("compute-sanitizer", "2025.3.1.0"), "memcheck", reference, "cpu", 120)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the tool writes where it is called for a case, and whether it runs what it is to, which this process does.

    Of other cases its output is without errors.
    """

    def given(written: str | None, runs: bool = True, status: int = 0, of: str = "") -> None:
        def run(command: list[str], seconds: float) -> "subprocess.CompletedProcess[str]":
            text = output() if of and of not in command else written
            if text is not None:
                Path(command[command.index("--save") + 1]).write_text(text)
            if runs:
                sanitizer.main(command[command.index(sanitizer.__name__) + 1 :])
            said = "========= Error: not attached" if status else ""
            return subprocess.CompletedProcess(command, status, said, "")

        monkeypatch.setattr(sanitizer, "_run", run)

    return given


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((None, False, 1), "wrote no output: it may not attach here; exit status 1: Error: not attached"),
        ((output(), False, 0), "not made under it; exit status 0"),
        ((output(HOST), False, 1), "not made under it; exit status 1: Error: not attached; cudaMemcpy: 700"),
        (("<x/>", True, 0), "expected XML"),
    ],
)
def test_a_tool_that_cannot_watch_is_unavailable(writes: Callable[..., None], arguments: Any, why: str) -> None:
    writes(*arguments)
    found = watch().calls([CASE])
    told = found.unavailable or found.cases[0].unavailable
    assert why in told and not any(each.errors for each in found.cases)


def test_clean_cases_share_a_process_and_an_error_is_told_of_the_case_that_shows_it(writes: Any) -> None:
    writes(wrote("memcheck"), of=DECODE)
    first, second = watch().calls([CASE, DECODE]).cases
    assert first.is_clean and [each.count for each in second.errors] == [2]
    writes(wrote("memcheck"), True, 1)
    (found,) = watch().calls([CASE]).cases
    assert [each.count for each in found.errors] == [2] and not found.unavailable
    writes(output())
    two = watch().calls([CASE, DECODE, OTHER], most=1)
    assert [each.case for each in two.cases] == [CASE, DECODE] and all(each.is_clean for each in two.cases)
    assert two.begin and two.begin.environment["device"] == "cpu" and not two.begin.unsupported


def test_a_call_that_raises_is_not_clean(tmp_path: Path, writes: Callable[..., None]) -> None:
    (tmp_path / "mine.py").write_text(
        "from mla_conformance.backends.eager import EagerPrefillBackend\n"
        "class Mine(EagerPrefillBackend):\n    def _batch(self, *a, **k): raise ValueError('no')\n"
    )
    writes(output())
    found = watch(f"{tmp_path}/mine.py:Mine").calls([CASE, DECODE])
    assert found.begin and found.begin.unsupported == (DECODE,)
    assert [each.unavailable for each in found.cases] == ["the call raised ValueError: no"]


def test_the_tool_says_its_version_and_its_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "version.json").write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}))
    path = tool(folder)
    monkeypatch.setenv("PATH", str(folder))
    assert Tool.found() == Tool(path, "2025.3.1.0", "12.4.1")
    Path(path).write_text(f"#!{sys.executable}\nraise SystemExit('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(ToolUnavailable, match=r"does not say which .* exit status 1: libcuda.so.1: cannot open"):
        Tool.found()
    Path(path).write_text("#!/nowhere\n")
    with pytest.raises(ToolUnavailable, match="compute-sanitizer cannot be run: No such file"):
        Tool.found()


def test_the_lines_name_kernel_cause_and_replay_and_what_says_nothing() -> None:
    error = SanitizerError("decode", "Invalid read", 2, "mla.cu:40", "mine.py:7")
    found = [Sanitized("lse:q=[4]", (error,)), Sanitized("lse:q=[8]", (error,)), Sanitized("lse:q=[9]", (), "too slow")]
    found.append(Sanitized("lse:q=[1]", seconds=1.5))
    mine = BackendReference("MINE", "a.py:MINE")
    said = list(lines(watch(), mine, sanitizer.Watched(sanitizer.CallsBegin(), tuple(found))))
    assert said[0] == "memcheck MINE: decode: Invalid read, 4 times, mla.cu:40, launched at mine.py:7"
    assert said[1] == "  replay: mla-conformance replay 'lse:q=[4]' --backend a.py:MINE"
    by = "compute-sanitizer 2025.3.1.0"
    assert said[2] == f"memcheck MINE unavailable for 1 case, such as lse:q=[9]: {by}: too slow"
    assert said[3] == "memcheck MINE: nothing reported of lse:q=[1], 1.5 s"
    assert said[4] == "memcheck MINE: nothing reported of 1 case, 0 unsupported, 1.5 s; no verdict"


def test_without_the_tool_the_command_says_so_and_nothing_passed(monkeypatch: Any, ours: Any) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    for more, status, said in (
        ([], 3, "racecheck unavailable: compute-sanitizer is not installed here"),
        (["--device", "cpu"], 3, "watches a GPU, not a CPU"),
        (["--record", "r.json"], 2, "--record: cannot be combined with --sanitize"),
    ):
        found, *printed = ours("certify", "--backend", "EAGER", "--sanitize", "racecheck", *more)
        assert found == status and said in "".join(printed)


def test_with_the_tool_and_without_a_gpu_too(here: Path, monkeypatch: Any, ours: Any, python: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(python))
    tool(here)
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, out, _ = ours("certify", "--backend", "EAGER", "--sanitize", "memcheck", "--submission", "s.jsonl")
    said = "memcheck EAGER unavailable: compute-sanitizer 2025.3.1.0: torch sees no CUDA device"
    assert status == 3 and said in " ".join(out.split()) and not (here / "s.jsonl").exists()
