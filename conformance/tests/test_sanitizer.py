"""What compute-sanitizer 2025.3.1 wrote on an H200 of kernels with planted errors, with fewer threads and frames."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.references import BackendReference
from mla_conformance.cli import main
from mla_conformance.commands.sanitize import lines
from mla_conformance.traits.called import CallsBegin
from mla_conformance.traits.sanitizer import Sanitized, Tool, ToolUnavailable, Watch, Watched
from mla_conformance.traits.sanitizer_output import SanitizerError, UnreadableOutput, errors_of

CASE, OTHER = "memory_bounds:dims=small;heads=1;q=[5]", "memory_bounds:dims=small;heads=1;q=[6]"
DECODE = "memory_bounds:call=decode;dims=small;heads=1;q=[1];kv=[5]"


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


@pytest.mark.parametrize(
    "said",
    [
        'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuGetProcAddress',
        'Program hit cudaErrorMemoryAllocation (error 2) due to "out of memory" on CUDA API call to cudaMalloc.',
    ],
)
def test_a_refusal_that_libraries_handle_is_no_error(said: str) -> None:
    record = f"<record><kind>Api</kind><what><text>{said}</text><api>cuda</api></what></record>"
    assert [each.kernel for each in errors_of(output(record, HOST))] == ["cudaMemcpy"]


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


PROGRAM = f"""#!{sys.executable}
import subprocess, sys
args = sys.argv[1:]
if args == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1) (public-release)")
    sys.exit()
written = WRITTEN
if OF and OF not in args: written = {output()!r}
if written is not None: open(args[args.index("--save") + 1], "w").write(written)
if RUNS: subprocess.run(args[args.index({sys.executable!r}):], check=True)
print("========= Error: not attached" if STATUS else "")
sys.exit(STATUS)
"""


def tool(folder: Path, written: str | None, runs: bool = True, status: int = 0, of: str = "") -> str:
    """A program that stands for the tool: it writes this output where it is called for a case, and runs what it is to.

    In another process of the same program it writes an output without errors.
    """
    path = folder / "compute-sanitizer"
    given = {"WRITTEN": written, "RUNS": runs, "STATUS": status, "OF": of}
    text = PROGRAM
    for name, value in given.items():
        text = text.replace(name, repr(value))
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def watch(path: str, reference: str = "EAGER") -> Watch:
    return Watch(Tool(path, "2025.3.1.0"), "memcheck", reference, "cpu", 120)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((None, False, 1), "wrote no output: it may not attach here; exit status 1: Error: not attached"),
        ((output(), False, 0), "not made under it; exit status 0"),
        ((output(HOST), False, 1), "not made under it; exit status 1: Error: not attached; cudaMemcpy: 700"),
        (("<x/>", True, 0), "expected XML"),
    ],
)
def test_a_tool_that_cannot_watch_is_unavailable(tmp_path: Path, arguments: Any, why: str) -> None:
    found = watch(tool(tmp_path, *arguments)).calls([CASE])
    told = found.unavailable or found.cases[0].unavailable
    assert why in told and not any(each.errors for each in found.cases)


def test_cases_that_are_watched_and_clean_share_a_process(tmp_path: Path) -> None:
    found = watch(tool(tmp_path, output())).calls([CASE, DECODE, OTHER], most=1)
    assert [each.case for each in found.cases] == [CASE, DECODE] and all(each.is_clean for each in found.cases)
    assert found.begin and found.begin.environment["device"] == "cpu" and not found.begin.unsupported


def test_of_several_cases_an_error_is_told_of_the_one_that_shows_it(tmp_path: Path) -> None:
    found = watch(tool(tmp_path, wrote("memcheck"), of=DECODE)).calls([CASE, DECODE])
    first, second = found.cases
    assert first.is_clean and [each.count for each in second.errors] == [2]


def test_errors_count_although_the_process_ended_badly(tmp_path: Path) -> None:
    found = watch(tool(tmp_path, wrote("memcheck"), True, 1)).calls([CASE])
    assert [each.count for each in found.cases[0].errors] == [2] and not found.cases[0].unavailable


def test_a_call_that_raises_is_not_clean(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mla_conformance.backends.eager import EagerPrefillBackend\n"
        "class Mine(EagerPrefillBackend):\n    def _batch(self, *a, **k): raise ValueError('no')\n"
    )
    found = watch(tool(tmp_path, output()), f"{tmp_path}/mine.py:Mine").calls([CASE, DECODE])
    assert found.begin and found.begin.unsupported == (DECODE,)
    assert [each.unavailable for each in found.cases] == ["the call raised ValueError: no"]


def test_the_tool_says_its_version_and_its_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "version.json").write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}))
    path = tool(folder, output())
    monkeypatch.setenv("PATH", str(folder))
    assert Tool.found() == Tool(path, "2025.3.1.0", "12.4.1")
    Path(path).write_text(f"#!{sys.executable}\nraise SystemExit('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(ToolUnavailable, match=r"does not say which .* exit status 1: libcuda.so.1: cannot open"):
        Tool.found()
    Path(path).write_text("#!/nowhere\n")
    with pytest.raises(ToolUnavailable, match="compute-sanitizer cannot be run: No such file"):
        Tool.found()


MINE = BackendReference("MINE", "a.py:MINE")


def test_the_lines_name_kernel_cause_and_replay_and_what_says_nothing() -> None:
    error = SanitizerError("decode", "Invalid read", 2, "mla.cu:40", "mine.py:7")
    found = [Sanitized("lse:q=[4]", (error,)), Sanitized("lse:q=[8]", (error,)), Sanitized("lse:q=[9]", (), "too slow")]
    said = list(lines(watch("x"), MINE, Watched(CallsBegin(), (*found, Sanitized("lse:q=[1]", seconds=1.5)))))
    assert said[0] == "memcheck MINE: decode: Invalid read, 4 times, mla.cu:40, launched at mine.py:7"
    assert said[1] == "  replay: mla-conformance replay 'lse:q=[4]' --backend a.py:MINE"
    by = "compute-sanitizer 2025.3.1.0"
    assert said[2] == f"memcheck MINE unavailable for 1 case, such as lse:q=[9]: {by}: too slow"
    assert said[3] == "memcheck MINE: nothing reported of lse:q=[1], 1.5 s"
    assert said[4] == "memcheck MINE: nothing reported of 1 case, 0 unsupported, 1.5 s; no verdict"


def test_a_tool_of_another_cuda_is_named_with_torchs() -> None:
    asked = Watch(Tool("x", "2024.1.0", "12.4"), "memcheck", "MINE", "cuda", 1)
    found = Watched(CallsBegin({"cuda": "13.0"}), unavailable="wrote no output; exit status 1: driver too new")
    first, *_ = lines(asked, MINE, found)
    who = "compute-sanitizer 2024.1.0 of CUDA 12.4, torch of CUDA 13.0"
    assert first == f"memcheck MINE unavailable: {who}: wrote no output; exit status 1: driver too new"


def test_without_the_tool_the_command_says_so_and_nothing_passed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert main(["certify", "--backend", "EAGER", "--sanitize", "racecheck"]) == 3
    assert "racecheck unavailable: compute-sanitizer is not installed here" in capsys.readouterr().out
    assert main(["certify", "--backend", "EAGER", "--sanitize", "racecheck", "--device", "cpu"]) == 3
    assert "watches a GPU, not a CPU" in capsys.readouterr().out
    assert main(["certify", "--backend", "EAGER", "--sanitize", "racecheck", "--record", "r.json"]) == 2
    assert "--record: cannot be combined with --sanitize" in capsys.readouterr().err


def test_with_the_tool_and_without_a_gpu_too(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    tool(tmp_path, output())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["certify", "--backend", "EAGER", "--sanitize", "memcheck", "--submission", f"{tmp_path}/s.jsonl"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "memcheck EAGER unavailable: compute-sanitizer 2025.3.1.0: torch sees no CUDA device" in out
    assert not (tmp_path / "s.jsonl").exists()
