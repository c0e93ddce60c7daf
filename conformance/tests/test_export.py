"""Scripts that show one call without this project: they find what the judge finds, or are refused with a reason."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.commands import export as command
from mla_conformance.commands.parser import command_line
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.diagnosis.explain import candidates, explain
from mla_conformance.export.failing import dump, reproduced
from mla_conformance.export.inputs import MOST_BYTES, NotWritable
from mla_conformance.export.program import Program, Recorder
from mla_conformance.export.script import MOST_LINES, script_of
from mla_conformance.judging.record import UNLIKE
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import write_case

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
CASE = "lse:dims=small;heads=2;q=[4,7]"
DEFECTS = {
    **dict.fromkeys(("right", "no-name", "raises"), ("self.scale", "self.scale")),
    "base2": ("transpose(0, 1), lse", "transpose(0, 1), lse / 0.6931471805599453"),
    "scaled": ("self.scale * ", "q.shape[-1] ** -0.5 * "),
    # Names that a script gives to something of its own, or that a standard module has, or no module could have.
    "k": ("self.scale", "self.scale"),
    "reference": ("        return (p @ v)", "        lse[1:] += 1\n        return (p @ v)"),
    "zlib": ("cu_seq_lens[chunk_idx]", "cu_seq_lens[0]"),
}
ALONE = """
import runpy, sys
sys.modules["mla_conformance"] = None
for path in sys.argv[1:-1]:
    try:
        try:
            runpy.run_path(path, run_name="__main__")
        except Exception:
            sys.excepthook(*sys.exc_info())  # as at the end of a process
    except SystemExit as end:
        print("ended with", end.code)
runpy.run_path(sys.argv[-1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("export")
    blocks = re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    (source,) = (block for block in blocks if "MyBackend" in block)
    for name, (old, new) in DEFECTS.items():
        assert old in source
        (made / f"{name}.py").write_text(source.replace(old, new), encoding="utf-8")
    return made


def asked(case: str, backend: str, out: Path) -> list[str]:
    return ["export", case, "--backend", backend, "--device", "cpu", "--out", str(out)]


def exported(reference: str, case: str, path: Path) -> str:
    text = script_of(reproduced(Subject.of(reference, CPU), Case.parse(case)), path)
    path.write_text(text, encoding="utf-8")
    return text


def test_the_command_writes_a_script_that_fails(folder: Path, python: Path, monkeypatch: Any, told: Any) -> None:
    monkeypatch.setattr(sys, "executable", str(python))
    few = [each for each in candidates(Role.PREFILL) if "base 2" in each.reported]
    monkeypatch.setattr("mla_conformance.diagnosis.explain.candidates", lambda role: few)
    monkeypatch.setattr(command.EXPLAINER, "explain", lambda function, failure: explain(failure))
    path = folder / "scripts" / "repro.py"
    said = told(0, *asked(CASE, f"{folder / 'base2.py'}:MyBackend", path))
    assert "checked: without mla-conformance the call fails, too" in said
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert re.search(r"^Looks like: The LSE is in base 2, .*like [\w-]+/[\w-]+#\d+$", text, re.MULTILINE)
    assert [each.name for each in path.parent.iterdir()] == ["repro.py"]


def test_scripts_end_as_the_judge_says_and_with_2_without_their_library(folder: Path, python: Path) -> None:
    """Whatever their backend's file is called; also where that is missing by now, or raises."""
    spoiled = "neighbour_keys:call=decode;dims=small;heads=2;q=[1,1,1];kv=[64,5,130];page=64;cache=fp8"
    chunked = "chunked_context:dims=small;heads=2;q=[3,4];kv=[64,130];page=64;workspace=128"
    cases = dict.fromkeys(("scaled", "k", "reference", "right", "no-name", "raises"), CASE)
    cases = {"TORCH_SDPA": spoiled, "zlib": chunked, **cases}
    texts, paths = {}, {name: folder / "scripts" / f"{number}.py" for number, name in enumerate(cases)}
    for name, case in cases.items():
        texts[name] = exported(f"{folder / name}.py:MyBackend" if name in DEFECTS else name, case, paths[name])
        assert len(texts[name].splitlines()) <= MOST_LINES
    assert "UNJUDGED = [2]" in texts["TORCH_SDPA"]
    assert "\nCalled here: context chunk 1 alone, on other operands than the case's.\n" in texts["zlib"]
    (folder / "no-name.py").unlink()
    (folder / "right.py").rename(paths["right"].with_name("right.py"))  # handed over beside its script
    (folder / "raises.py").write_text((folder / "raises.py").read_text().replace("query_starts.tolist()", "1 / 0"))
    done = subprocess.run([str(python), "-P", "-c", ALONE, *map(str, paths.values())], capture_output=True, text=True)
    printed = re.split(r"ended with (\d)\n", done.stdout)
    ended = dict(zip(cases, printed[1::2], strict=False))
    assert ended == dict(zip(cases, "0110102", strict=False))
    reported = dict(zip(cases, printed[::2], strict=True))
    assert re.search(r"LSE at head \d, row \d+: got .*, expected .*, error .*, budget ", reported["scaled"])
    assert "11 of 22 wrong in 1 of 2 heads (1), the worst " in reported["reference"]
    assert re.search(r": FileNotFoundError: .*no-name\.py' \(needs torch, no-name\.py\)", reported["no-name"])
    assert "cannot be decided here: ZeroDivisionError: division by zero" in reported["raises"] and done.returncode == 2
    assert "raises.py" in done.stderr and "1 / 0" in done.stderr


@pytest.mark.parametrize(
    ("status", "printed", "said"),
    [
        (0, "1 of 2 wrong\nright\n", "does not give the judge's verdict: the script says right, the judge: new tokens"),
        (1, "AttributeError: 'function'", "does not run without mla-conformance: exit status 1, printed: Attribute"),
        (0, "WRONG\nsaid at exit\n", "does not run without mla-conformance: exit status 0, printed: WRONG · said at"),
    ],
)
def test_no_other_is_kept(folder: Any, monkeypatch: Any, refused: Any, status: int, printed: str, said: str) -> None:
    monkeypatch.setattr(command, "run_alone", lambda script: CompletedProcess((), status, printed))
    monkeypatch.setattr(command.EXPLAINER, "explain", lambda function, failure: "")
    assert said in refused(*asked(CASE, f"{folder / 'scaled.py'}:MyBackend", folder / "none.py"))
    assert not (folder / "none.py").exists()


def test_a_failure_that_nothing_explains_is_like_nothing_and_inputs_are_written_as_they_are(
    folder: Path, here: Path, monkeypatch: Any, told: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(command.EXPLAINER, "explain", lambda function, failure: UNLIKE)
    monkeypatch.setattr(command, "run_alone", lambda script: CompletedProcess((), 1, "WRONG\nsaid at exit\n"))
    write_case(here / "case.json", Case.parse(CASE))
    told(0, *asked("case.json", f"{folder / 'scaled.py'}:MyBackend", here / "x.py"))
    text = (here / "x.py").read_text(encoding="utf-8")
    assert f"\nCase {Case.parse(CASE).id}\n" in text and "like" not in text.partition("import")[0]
    text = exported("TORCH_SDPA", "lse:dims=small;heads=1;q=[5];data=needle", tmp_path / "x.py")
    assert 'q = unpacked("""' in text and "k = torch.randn(" in text


def test_a_place_for_no_file_is_refused_before_anything_is_run(here: Path, monkeypatch: Any, refused: Any) -> None:
    monkeypatch.delattr(command, "reproduced")
    (here / "kernel.py").write_text("mine")
    said = refused("replay", CASE, "--backend", "TORCH_SDPA", "--dump", here)
    assert "expected a new or an empty folder" in said
    for out, said in (
        ("kernel.py", "kernel.py: exists, and export did not write it; name another file\n"),
        ("kernel.py/x.py", f"expected a folder that takes files, got {here / 'kernel.py'}\n"),
    ):
        assert refused(*asked(CASE, "TORCH_SDPA", Path(out))).endswith(said)
    assert (here / "kernel.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("case", "said", "backend"),
    [
        ("mixed_batch:call=layer;q=[1,5];kv=[9,0]", "a layer case, whose tensors `replay --dump` writes", "TORCH_SDPA"),
        ("chunked_context:q=[5];kv=[9]", "none of which is wrong by itself; `replay --dump`", "TORCH_SDPA"),
        ("quant_output_fp8:q=[5];quant=fp8", "an output in e4m3 codes", "TORCH_SDPA"),
        ("lse:dtype=fp64;q=[4]", "a script shows wrong numbers; the verdict is unsupported", "TORCH_SDPA"),
        (CASE, "needs compute capability 9.x: this device has none", "FLASH_ATTN[fa3]"),
    ],
)
def test_what_no_script_shows_is_refused(tmp_path: Path, refused: Any, case: str, said: str, backend: str) -> None:
    assert said in refused(*asked(case, backend, tmp_path / "x.py")) and list(tmp_path.iterdir()) == []


def test_a_case_that_is_too_large_gets_the_commands_that_come_next(tmp_path: Path, refused: Any) -> None:
    case, out = "lse:q=[64];data=needle", tmp_path / "a script.py"
    said = refused(*asked(case, "TORCH_SDPA", out))
    assert f" characters, a script has room for {MOST_BYTES}; a smaller case may fit: " in said
    commands = [text.rstrip(";") for text in re.findall(r"mla-conformance (\w+ .*?)(?= && |; |$)", said, re.MULTILINE)]
    small, again, dumped = (command_line(COMMANDS, GROUPS).parse_args(shlex.split(text)) for text in commands)
    assert (small.case, small.out, dumped.case) == (case, Path(again.case), case)
    assert {given.backend + given.device for given in (small, again, dumped)} == {"TORCH_SDPAcpu"} and again.out == out


def test_stored_scripts_are_whole_and_need_nothing_of_ours_and_each_is_told() -> None:
    reported = (ROOT / "docs" / "reproducers" / "README.md").read_text(encoding="utf-8")
    stored = sorted((ROOT / "docs" / "reproducers").glob("*.py"))
    assert sorted(re.findall(r"\((\w+\.py)\)", reported)) == [path.name for path in stored] != []
    for script in stored:
        text = script.read_text(encoding="utf-8")
        found = {name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
        assert "torch" in found and not any(name.startswith("mla_conformance") for name in found), script.name
        assert len(text.splitlines()) <= MOST_LINES, script.name
        assert Case.parse(re.findall(r"^Case (.*)$", text, re.MULTILINE)[0]).id in reported, script.name


class _Wrapper:
    """A library's object that is planned, then run, and writes its LSE where it is told."""

    def plan(self, scale: float) -> None:
        self.scale = scale

    def run(self, q: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, None]:
        lse.copy_(self.scale * q.sum(-1))
        return q * self.scale, None


def _adapter(library: Library, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    toy = library.load()
    wrapper = toy.Wrapper()
    assert toy.version() == "1.0"
    lse = q.new_zeros(q.shape[:2])
    unused = q.exp()
    assert unused.isfinite().all()
    wrapper.plan(0.5)
    output, _ = wrapper.run(torch.nn.functional.pad(q, (0, 3)), lse)
    part = output[..., : q.shape[-1]]
    part[0] = 0
    return part, lse.mT


def test_a_library_with_state_is_written_down_with_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("q")
    vars(module).update(Wrapper=_Wrapper, version=lambda: "1.0", MODES=("fast",))
    monkeypatch.setitem(sys.modules, "q", module)
    library, q = Library("q", "toy-attention", "pip install toy-attention"), torch.randn(3, 2, 4)
    with Recorder() as recorder:
        results = _adapter(library, q)
    program = Program(recorder.steps, {"q": q}, results)
    assert program.modules == {"q": "library"} and program.used == {"q"}, "a module may be called as an operand is"
    assert not re.search(r"exp|version|isfinite", "\n".join(program.lines))
    space: dict[str, Any] = {"torch": torch, "q": q.clone(), "library": sys.modules["q"]}
    exec("\n".join(program.lines), space)
    for expression, result in zip(program.results, results, strict=True):
        assert torch.equal(eval(expression, space), result)
    assert isinstance(library.load(), ModuleType), "nothing is recorded any more"
    given, kept = torch.randn(3), torch.randn(3)
    with Recorder() as recorder:
        result = given + kept
    with pytest.raises(NotWritable, match=r"depends on a torch\.float32 \[3\] that was neither given"):
        Program(recorder.steps, {"q": given}, [result])


def test_a_dump_holds_what_a_case_was_judged_by(folder: Path, tmp_path: Path) -> None:
    dump(Subject.of(f"{folder / 'base2.py'}:MyBackend", CPU), Case.parse(CASE), tmp_path / "new")
    data = torch.load(tmp_path / "new" / "tensors.pt", weights_only=True)
    name = "LSE of new tokens"
    assert data["case"] == Case.parse(CASE).id and "v of new tokens" in data["operands"]
    assert torch.allclose(data["returned"][name].double(), data["golden"][name] / 0.6931471805599453)
    assert bool((data["error"][name] > data["budget"][name]).all())
    assert "LSE is" in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    picture = (tmp_path / "new" / "LSE-of-new-tokens.svg").read_text(encoding="utf-8")
    assert "22 of 22 cells over their budget" in picture
