"""Scripts that show one call without this project: they find what the judge finds, or are refused with a reason."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_conformance.backends.dependencies import Library
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.commands import export as command
from mla_conformance.driving.subject import Subject
from mla_conformance.export.checked import Ran
from mla_conformance.export.dump import dump, require_empty
from mla_conformance.export.failing import reproduced
from mla_conformance.export.literals import NotWritable, folded
from mla_conformance.export.program import written
from mla_conformance.export.recording import Recorder
from mla_conformance.export.script import MOST_LINES, script_of
from mla_conformance.files.inputs import InputError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
CASE = "lse:dims=small;heads=2;q=[4,7]"
DEFECTS = {
    "right": ("self.scale", "self.scale"),
    "base2": ("transpose(0, 1), lse", "transpose(0, 1), lse / 0.6931471805599453"),
    "scaled": ("self.scale * ", "q.shape[-1] ** -0.5 * "),
}
ALONE = """
import runpy, sys
sys.modules["mla_conformance"] = None
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's backend, right and with two defects."""
    made = tmp_path_factory.mktemp("export")
    (source,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
        if "MyBackend" in block
    )
    for name, (old, new) in DEFECTS.items():
        assert old in source
        (made / f"{name}.py").write_text(source.replace(old, new), encoding="utf-8")
    return made


def exported(reference: str, case: str, path: Path) -> str:
    text = script_of(reproduced(Subject.of(reference, CPU), Case.parse(case)), path)
    path.write_text(text, encoding="utf-8")
    return text


def test_the_command_writes_a_script_that_fails_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "scripts" / "repro.py"
    arguments = ["export", CASE, "--backend", f"{folder / 'base2.py'}:MyBackend", "--device", "cpu", "--out", str(path)]
    assert main(arguments) == 0
    assert "fails without mla-conformance as it does with it" in capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert [each.name for each in path.parent.iterdir()] == ["repro.py"]


def test_scripts_end_as_the_judge_says_and_with_2_without_their_library(folder: Path) -> None:
    """A wrong scale, spoiled neighbours over a paged cache of codes, and a script without its backend's file."""
    spoiled = "neighbour_keys:call=decode;dims=small;heads=2;q=[1,1,1];kv=[64,5,130];page=64;cache=fp8"
    cases = {"scaled.py:MyBackend": CASE, "TORCH_SDPA": spoiled, "right.py:MyBackend": CASE}
    paths = []
    for number, (reference, case) in enumerate(cases.items()):
        paths.append(folder / f"script{number}.py")
        text = exported(str(folder / reference) if ":" in reference else reference, case, paths[-1])
        assert len(text.splitlines()) <= MOST_LINES
    assert "UNJUDGED = [2]" in paths[1].read_text(encoding="utf-8")
    (folder / "right.py").unlink()
    done = subprocess.run([sys.executable, "-c", ALONE, *map(str, paths)], capture_output=True, text=True, check=True)
    ended = re.findall(r"ended with (\d)", done.stdout)
    assert ended == ["1", "0", "2"], done.stdout
    assert re.search(r"LSE at head \d, row \d+: got .*, expected .*, error .*, budget ", done.stdout)
    assert "cannot be told here: No module named 'right' (needs torch, right.py)" in done.stdout


def test_a_script_that_finds_something_else_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_alone", lambda script: Ran(0, "right"))
    path = folder / "none.py"
    arguments = ["--backend", f"{folder / 'base2.py'}:MyBackend", "--device", "cpu", "--out", str(path)]
    assert main(["export", CASE, *arguments]) == 2
    assert "one call alone does not show it: the script ended with 0" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mixed_batch:call=layer;q=[1,5];kv=[9,0]", "a script makes one call of a prefill or a decode kernel"),
        ("chunked_context:q=[5];kv=[9]", "the case merges what several calls return"),
        ("quant_output_fp8:q=[5];quant=fp8", "an output in e4m3 codes"),
        ("kv_cache_fp8_ds_mla:call=decode;q=[1];kv=[9];cache=fp8_ds_mla", "a cache of fp8_ds_mla"),
        ("lse:q=[64];data=needle", "a script has room for 6000; export a smaller case"),
        ("lse:dtype=fp64;q=[4]", "a script shows wrong numbers; the verdict is unsupported"),
    ],
)
def test_what_no_script_shows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, said: str
) -> None:
    assert main(["export", case, "--backend", "TORCH_SDPA", "--device", "cpu", "--out", str(tmp_path / "x.py")]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_run_here_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend", "FLASH_ATTN[fa3]", "--device", "cpu", "--out", str(tmp_path / "x.py")]
    assert main(["export", CASE, *options]) == 2
    assert "needs compute capability 9.x: this device has none" in capsys.readouterr().err


def test_a_class_that_computes_with_this_project_is_refused(tmp_path: Path) -> None:
    source = "from mla_conformance.backends.eager import EagerPrefillBackend\nclass Mine(EagerPrefillBackend): ...\n"
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(NotWritable, match=r"mine\.py computes with EagerPrefillBackend of mla_conformance\.backends"):
        exported(f"{tmp_path / 'mine.py'}:Mine", CASE, tmp_path / "x.py")


def test_inputs_that_no_seed_makes_are_written_as_they_are(tmp_path: Path) -> None:
    text = exported("TORCH_SDPA", "lse:dims=small;heads=1;q=[5];data=needle", tmp_path / "x.py")
    assert 'q = unpacked("""' in text and "k = torch.randn(" in text


STORED = sorted((ROOT / "docs" / "reproducers").glob("*.py"))


@pytest.mark.parametrize("script", STORED, ids=lambda path: path.stem)
def test_a_stored_script_is_whole_and_needs_nothing_of_ours(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    found = {name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
    assert "torch" in found and not any(name.startswith("mla_conformance") for name in found)
    assert len(text.splitlines()) <= MOST_LINES
    told = (script.parent / "README.md").read_text(encoding="utf-8")
    assert f"({script.name})" in told and Case.parse(re.findall(r"^Case (.*)$", text, re.MULTILINE)[0]).id in told


def test_what_is_told_of_stored_scripts_is_there() -> None:
    told = (ROOT / "docs" / "reproducers" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\w+\.py)\)", told)) == [path.name for path in STORED] != []


class _Wrapper:
    """A library's object that is planned, then run, and writes its LSE where it is told."""

    def plan(self, scale: float) -> None:
        self.scale = scale

    def run(self, q: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, None]:
        lse.copy_(self.scale * q.sum(-1))
        return q * self.scale, None


def _toy(monkeypatch: pytest.MonkeyPatch) -> Library:
    module = ModuleType("toy_attention")
    vars(module).update(Wrapper=_Wrapper, version=lambda: "1.0", MODES=("fast",))
    monkeypatch.setitem(sys.modules, "toy_attention", module)
    return Library("toy_attention", "toy-attention", "pip install toy-attention")


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
    library, q = _toy(monkeypatch), torch.randn(3, 2, 4)
    with Recorder() as recorder:
        results = _adapter(library, q)
    program = written(recorder.steps, {"q": q}, results)
    assert program.modules == {"toy_attention": "toy_attention"} and program.used == {"q"}
    assert not re.search(r"exp|version|isfinite", "\n".join(program.lines))
    space: dict[str, Any] = {"torch": torch, "q": q.clone(), "toy_attention": sys.modules["toy_attention"]}
    exec("\n".join(program.lines), space)
    for expression, result in zip(program.results, results, strict=True):
        assert torch.equal(eval(expression, space), result)
    assert isinstance(library.load(), ModuleType), "nothing is recorded any more"


def test_what_came_from_nowhere_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kept = torch.randn(3), torch.randn(3)
    with Recorder() as recorder:
        result = q + kept
    with pytest.raises(NotWritable, match=r"depends on a torch\.float32 \[3\] that was neither given"):
        written(recorder.steps, {"q": q}, [result])


def test_long_statements_are_broken_between_arguments() -> None:
    text = f"x = library.call({', '.join(f'argument_{n}=(1, {n})' for n in range(12))})"
    lines = folded(text)
    assert len(lines) > 1 and max(map(len, lines)) <= 112
    assert "".join(line.strip() for line in lines).replace(",", ", ").replace(",  ", ", ") == text


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
    with pytest.raises(InputError, match="expected a new or an empty folder"):
        require_empty(tmp_path / "new")


def test_replay_refuses_a_folder_in_use_before_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").touch()
    assert main(["replay", CASE, "--backend", "TORCH_SDPA", "--dump", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "expected a new or an empty folder" in captured.err and captured.out == ""
