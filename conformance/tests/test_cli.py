"""The command line on bad input: exit status 2 before anything runs, and a message that lists what exists."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mla_conformance.__main__ import start
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.commands.parser import command_line, commands_of
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.engine.request import RunRequest
from mla_conformance.judging.record import Status
from mla_conformance.report.outcome import backend_lines, capability_lines
from mla_conformance.tests.drawn import judged
from mla_conformance.tests.reports import run_of
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.capabilities import Tier, find_capability

Ours = Callable[..., tuple[int, str, str]]
EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend as E\n"

CERTIFY, REPLAY = "certify --device cpu --out out --backend", "replay --backend EAGER --device cpu"
FILES = dict.fromkeys(("a.py", "b.py"), f"{EAGER}class Mine(E): ...") | {"broken.py": "class (", "empty.py": ""}
FILES |= {"near.py": "import nothing_such\nclass Mine: ...\nclass _Part: ...\n"}
FILES |= {"function.py": "def decode(q, **_): ...\n", "others.py": "class MyBackend: ...\nclass Other: ...\n"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"{CERTIFY} NOPE", "unknown backend 'NOPE'; expected one of EAGER, TORCH_SDPA"),
        (f"{CERTIFY} torch_spda", "'torch_spda'; did you mean TORCH_SDPA? 'mla-conformance backends' lists all\n"),
        (f"{CERTIFY} no/such/file.py:Mine", "no file "),
        (f"{CERTIFY} a.py:Mine --backend b.py:Mine", "two backends named 'Mine': HERE/a.py:Mine and HERE/b.py:Mine"),
        (f"{CERTIFY} near.py", "expected near.py:Class; did you mean near.py:Mine?\n"),
        (f"{CERTIFY} function.py", "expected function.py:Class; it defines no class\n"),
        (f"{CERTIFY} function.py:decode", "expected a class, got a function, which mla.cases judges: docs/python-ap"),
        (f"{CERTIFY} broken.py", "broken.py:Class; the file is no Python: invalid syntax (broken.py, line 1)\n"),
        (f"{CERTIFY} others.py:MyBackedn", "no class MyBackedn in others.py; did you mean others.py:MyBackend?\n"),
        (f"{CERTIFY} empty.py:MyBackedn", "no class MyBackedn in empty.py; it defines no class\n"),
        (f"{CERTIFY} EAGER --capability lse --shard ١/٢", "--shard: expected i/n with 1 <= i <= n"),
        (f"{CERTIFY} EAGER --capability nope", "unknown capability 'nope'; expected one of new_tokens, lse"),
        (f"{REPLAY} 'decode_lse:q=[1];kv=[3]'", "expected a call of decode_lse, such as call=decode, got new_tokens"),
        (f"{REPLAY} 'tree:q=[1];kv=[3]'", "not a capability; expected one of tree_decode, determinism, "),
        (f"{REPLAY} 'large_offsets:call=decode;q=[1];kv=[3];far=k31'", "expected none or cache31 or cache32 of a "),
        (f"{CERTIFY} EAGER --capability new_token", "; did you mean new_tokens? 'mla-conformance capabilities' lis"),
        ("certify --out out --model deepseek-r", "; did you mean deepseek-r1? 'mla-conformance models' lists all\n"),
        ("certify --out out --device cuda -n1", "sees no CUDA device; use --device cpu"),
        ("watch EAGER", "expected a class in a file, as file.py:Class, got EAGER"),
    ],
)
def test_what_does_not_exist_is_told_before_anything_runs(
    refused: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, source in FILES.items():
        Path(name).write_text(source)
    told = refused(*shlex.split(arguments)).replace(str(here), "HERE")
    assert said in told and not Path("out").exists()


@pytest.mark.parametrize("source", ["globals()['My' + 'Own'] = int", "from x import *", "import x\nMyOwn = x.Y"])
def test_a_class_that_its_file_may_make_is_looked_for_where_it_is_imported(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    assert RunRequest.of([f"{tmp_path / 'mine.py'}:MyOwn"]).backends[0].name == "MyOwn"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nope", "unknown command 'nope'; expected one of certify, watch, "),
        ("certfy", "unknown command 'certfy'; did you mean certify? 'mla-conformance --help' lists all"),
        ("report rnder", "did you mean render? 'mla-conformance report --help' lists all"),
        ("certify mine.py:Mine", "; a backend is named with an option: --backend mine.py:Mine"),
        ("watch mine.py:Mine TORCH_SDPA", "unrecognized arguments: TORCH_SDPA\n"),
        ("minimize lse:q=[1]", "arguments are required: --backend"),
        ("certify --tier huge", "--tier: unknown value 'huge'; expected one of smoke, full, nightly\n"),
        ("certify -n 0", "a number of at least 1 and at most "),
        ("certify -n 99999999999999999999", " expected "),
        ("certify -n +2", " expected "),
        ("certify --explore 1_0", " expected "),
        ("certify --deadline 99999999h", " expected "),
        ("report diff a b --drift 0_1", " expected "),
        ("minimize lse:q=[1] --backend EAGER --tries 1e3", " expected "),
        ("replay lse:q=[1] --timeout 0", "expected a positive time"),
        (f"replay lse:q=[1] --timeout {'9' * 300}", " expected "),
    ],
)
def test_a_command_that_does_not_exist(refused: Any, arguments: str, said: str) -> None:
    printed = refused(*arguments.split())
    assert "usage: mla-conformance" in printed and said in printed


def test_without_a_command_it_is_told_how_to_begin(refused: Callable[..., str], ours: Ours) -> None:
    assert ours("--version") == (0, f"mla-conformance {__version__}, suite {SUITE_VERSION}\n", "")
    printed = refused()
    assert printed.startswith("usage: mla-conformance ") and "--backend my_backend.py:MyBackend " in printed
    for line in re.findall("^  mla-conformance (.*?)  +", printed, re.MULTILINE)[:-1]:
        assert callable(command_line(COMMANDS, GROUPS).parse_args(shlex.split(line)).run)


def test_every_command_ends_its_help_with_examples_that_parse_and_its_exit_status() -> None:
    found = dict(commands_of(command_line(COMMANDS, GROUPS)))
    examples = {command.words: command.examples for command in COMMANDS}
    assert found.keys() == examples.keys() and len(found) == len(COMMANDS)
    for words, command in found.items():
        assert command.epilog is not None and "exit status: " in " ".join(command.format_help().split())
        calls = re.findall(rf"^  mla-conformance ({words}\b.*)$", re.sub(r" \\\n +", " ", command.epilog), re.MULTILINE)
        assert len(calls) == len(examples[words]) >= 1
        for call in calls:
            assert callable(command_line(COMMANDS, GROUPS).parse_args(shlex.split(call.partition(" > ")[0])).run)


def test_every_option_is_described_and_help_keeps_to_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parsers = [command_line(COMMANDS, GROUPS)]
    for parser in parsers:  # grows by the parsers of commands and of their groups
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)
        assert [line for line in parser.format_help().splitlines() if len(line) > 80] == [], parser.prog


def test_shells_complete_commands_options_and_names(tmp_path: Path, command: Path, ours: Ours) -> None:
    names = ("certify", "minimize", "give-up-after", "TORCH_SDPA", "new_tokens", "nightly")
    for shell in ("zsh", "fish", "tcsh"):
        status, script, _ = ours("completion", shell)
        assert status == 0 and all(name in script for name in names), shell
    typed = ("'' certify --backend FLEX", "'' report d", "'' replay --rep")
    asked = [f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}" for words in typed]
    ask = "\n".join(f"{each}; _shtab_mla_conformance; echo ${{COMPREPLY[@]}}" for each in asked)
    script = subprocess.run([command, "completion", "bash"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == ["FLEX_ATTENTION", "diff", "--report --repeats"]


def test_backends_are_listed_with_reasons(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, said, _ = ours("backends", "--device", "cpu")
    printed = said.splitlines()
    assert max(map(len, printed)) <= 80 and not [line for line in printed if re.search(r"\(pip [^)]*$", line)]
    assert printed[0].endswith(" available:") and {"EAGER,", "TORCH_SDPA,"} <= set(printed[1].split())
    assert sum("they need a GPU" in line for line in printed) == 1 and len(printed) < 50
    assert "    nvidia-cudnn-frontend: CUDNN, CUDNN[graph], CUDNN[fp8]" in printed
    again, said, _ = ours("backends", "TRTLLM_RAGGED", "--device", "cpu")
    named = " ".join(said.split())
    assert named.startswith("TRTLLM_RAGGED unavailable: needs compute capability") and "of no use here" in named
    assert status == again == 0


def test_help_usage_errors_lists_references_and_cases_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = (["--backend", "NOPE"], ["--tier", "huge"], ["--nonsense"], ["--backend", "EAGER", "--out", "file"])
    commands = [["--help"], ["certify", "--help"], *(["certify", *each] for each in wrong), ["capabilities"]]
    commands += map(str.split, ["replay no-case --backend EAGER", "models", "gate none", "report diff a b"])
    code = f"""
import sys
import mla_conformance as mla
import mla_conformance.fixtures
from mla_conformance.backends.references import known_variants, parse_reference
from mla_conformance.backends.registry import MLAPrefillBackendEnum
from mla_conformance.cli import main
from mla_conformance.reference import chunking, dimensions
from mla_conformance.commands import listing
listing.SPACES = {{name: listing.SPACES[name] for name in ["prepare_combinations"]}}  # the others' lines are alike
assert [parse_reference(each.name) for each in known_variants()] == known_variants()
assert MLAPrefillBackendEnum["FLASH_ATTN"].get_path().endswith("FlashAttnPrefillBackend")
for command in {commands}:
    try:
        status = main(command)
    except SystemExit as ended:
        status = ended.code
    print(status)
mla.cases("decode", capability="decode_lse")
sys.exit(any(name in sys.modules for name in ("torch", "rich", "shtab", "pytest")))
"""
    narrow = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=narrow)
    printed = done.stdout.splitlines()
    assert [line for line in printed if line.isdigit()] == [*"0022220201", "2"]
    assert max(map(len, printed)) <= 80
    (lse,) = [line for line in printed if line.startswith("lse ")]
    assert "cases · SPEC 1.4 · The LSE is the natural logarithm" in lse
    assert done.returncode == 0, done.stderr


class NotDeclared(EagerPrefillBackend):
    declaration = Declaration(deterministic=False)


def test_what_only_refuses_or_is_undeclared_is_not_called_right() -> None:
    """SGLANG_TRITON_SPARSE[union4] passed 19 cases, all of them refusals, and got a record."""
    refused = judged(NotDeclared, Case.parse("refusals:dims=small;heads=2;q=[9];dtype=fp64;out=1;lse=0"))
    (case,) = find_capability("determinism").select(Tier.SMOKE)[:1]
    asked = run_of([refused]), run_of([refused, judged(NotDeclared, case)])
    assert [run.exit_status for run in asked] == [0, 3]
    first, more = (next(iter(backend_lines(run.backends[0], 200))) for run in asked)
    assert first == "NotDeclared ✔ refuses 1 case as it must, nothing else was asked"
    assert more == "NotDeclared – not judged: refuses 1 case as it must, and none of 1 other case is supported"
    records = [judged(NotDeclared, case) for case in find_capability("determinism").select(Tier.SMOKE)]
    assert {record.status for record in records} == {Status.UNSUPPORTED}
    assert {record.message for record in records} == {"not declared deterministic", "prefill only"}
    assert list(capability_lines(records)) == ["NotDeclared – unsupported", "  – 1 unsupported: determinism"]


def test_an_interrupt_while_it_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mla_conformance.cli")
    interrupts = SimpleNamespace(find_spec=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "meta_path", [interrupts, *sys.meta_path])
    with pytest.raises(SystemExit, match=r"^130$"):
        start()
