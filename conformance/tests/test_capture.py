"""Capture: an engine's calls become case files that the suite judges; nothing of it may disturb the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.capture import VARIABLE, capture, capture_from_environment
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import run_calls
from mla_conformance.roles.definition import build_problem
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import read_case, read_cases, write_case

CPU = torch.device("cpu")
CERTIFY = ["certify", "--backend", "EAGER", "--device", "cpu", "-n", "1"]


def drive(case: Case) -> None:
    run_calls(Subject.of("EAGER", CPU).create(case), build_problem(case, CPU))


@pytest.mark.parametrize(
    "text",
    [
        "new_tokens:dtype=fp16;dims=small;heads=3;q=[5];scale=100;layout=packed;lse=0",
        "new_tokens:dims=24-8-16-32;q=[2,0,3];layout=heads_first;out=1;pad=2",
        "new_tokens:q=[3];layout=sliced;inflate=3",
        "context_chunk:q=[2,1];kv=[0,7];layout=odd",
        "context_chunk:dims=v2;q=[2];kv=[5];inflate=2",
        "decode:dtype=fp16;dims=small;heads=3;q=[3,1];kv=[40,0];page=64;scale=50;layout=packed",
        "decode:q=[2,2];kv=[9,70];layout=heads_first;pad=2;inflate=100",
        "decode:q=[1,1];kv=[9,70];page=1;layout=odd;cache=fp8;layers=3",
        "decode:q=[1,1];kv=[300,5];page=64;layout=sliced;cache=fp8_ds_mla",
        "decode:q=[2,1];kv=[0,40];cache=fp8;ranks=3;interleave=16",
    ],
)
def test_a_call_of_the_suite_is_captured_as_its_own_case(tmp_path: Path, text: str) -> None:
    with capture(EagerDecodeBackend if text.startswith("decode") else EagerPrefillBackend, tmp_path):
        drive(Case.parse(text))
    # Presets of the same numbers are one layer.
    (captured,) = read_cases(tmp_path)
    assert captured.id == text.replace("dims=v2;", "")


def test_what_has_no_calls_is_refused_and_a_wrong_call_keeps_its_own_error(tmp_path: Path) -> None:
    backend = Subject.of("EAGER", CPU).create(Case.parse("new_tokens:q=[2]"))
    with capture(backend, tmp_path), pytest.raises(TypeError, match="missing"):
        backend.run_prefill_new_tokens()
    said = "run_prefill_context_chunk or prepare_metadata, run_decode, got .*of a layer"
    with pytest.raises(TypeError, match=said), capture(object(), tmp_path):
        pass


def test_a_batch_gives_a_case_per_distinct_call_and_what_another_rank_wrote_is_kept(tmp_path: Path) -> None:
    case = Case.parse("chunked_context:q=[3];kv=[70];workspace=32")
    with capture(EagerPrefillBackend, tmp_path):
        drive(case)
        drive(case)
    chunks = ["context_chunk:q=[3];kv=[32]", "context_chunk:q=[3];kv=[6]"]
    assert [c.id for c in read_cases(tmp_path)] == [*chunks, "new_tokens:q=[3]"]
    case, ranks = Case.parse("new_tokens:q=[2]"), tmp_path / "ranks"
    path = ranks / f"{case.capability}-{case.digest}.json"
    write_case(path, case, {"note": "first"})
    with capture(EagerPrefillBackend, ranks):
        drive(case)
    assert read_cases(ranks) == (case,) and read_case(path) == case
    assert json.loads(path.read_text())["observed"] == {"note": "first"}


def test_an_instance_is_captured_while_the_context_lasts(tmp_path: Path) -> None:
    case = Case.parse("new_tokens:q=[2]")
    backend, problem = Subject.of("EAGER", CPU).create(case), build_problem(case, CPU)
    problem.calls[0].prepare(backend)
    with capture(backend, tmp_path / "inside"):
        drive(case)
        assert not (tmp_path / "inside").exists()
        run_calls(backend, problem, prepare=False)
    assert [c.id for c in read_cases(tmp_path / "inside")] == [case.id]
    assert not {"prepare_metadata", "run_prefill_new_tokens"} & set(vars(backend))
    before = dict(vars(EagerPrefillBackend))
    with capture(EagerPrefillBackend, tmp_path):
        assert vars(EagerPrefillBackend) != before
    assert dict(vars(EagerPrefillBackend)) == before


def test_values_are_read_only_when_asked_for_and_strides_and_dtypes_always(tmp_path: Path) -> None:
    case = Case.parse("new_tokens:q=[2];quant=fp8;oscale=250000;out=1")
    for values, scale in ((False, 13000), (True, 250000)):
        with capture(EagerPrefillBackend, tmp_path / str(values), values=values):
            drive(case)
        (captured,) = read_cases(tmp_path / str(values))
        assert isinstance(captured, PrefillCase) and (captured.quant, captured.oscale) == ("fp8", scale)
    case = Case.parse("decode:q=[1];kv=[9];cache=fp8;kscale=2300000")
    with capture(EagerDecodeBackend, tmp_path / "decode", values=True):
        drive(case)
    assert read_cases(tmp_path / "decode") == (case,)
    with capture(EagerPrefillBackend, tmp_path / "observed"):
        drive(Case.parse("new_tokens:dims=24-8-16-32;heads=2;q=[3]"))
    (path,) = (tmp_path / "observed").iterdir()
    seen = json.loads(path.read_text())["observed"]
    assert seen["backend"] == "EagerPrefillBackend"
    assert seen["v"] == {"shape": [3, 2, 16], "stride": [80, 40, 1], "dtype": "bfloat16", "device": "cpu"}


def test_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("new_tokens:q=[2]")
    for folder in ("", str(tmp_path / "cases")):
        monkeypatch.setenv(VARIABLE, folder)
        backend = Subject.of("EAGER", CPU).create(case)
        capture_from_environment(backend)
        run_calls(backend, build_problem(case, CPU))
    assert [c.id for c in read_cases(tmp_path / "cases")] == [case.id]


def test_a_limit_and_a_full_disk_do_not_reach_the_engine(tmp_path: Path) -> None:
    with capture(EagerPrefillBackend, tmp_path / "few", limit=2):
        for tokens in (1, 2, 3):
            drive(Case.of(capability="new_tokens", q=(tokens,)))
    assert len(read_cases(tmp_path / "few")) == 2
    (tmp_path / "file").write_text("")
    said = "was not captured: FileExistsError"
    with capture(EagerPrefillBackend, tmp_path / "file"), pytest.warns(match=said) as caught:
        drive(Case.parse("chunked_context:q=[3];kv=[70];workspace=32"))
    assert len(caught) == 1


def test_a_folder_of_captured_cases_is_judged(tmp_path: Path, told: Any, refused: Any) -> None:
    with capture(EagerPrefillBackend, tmp_path / "cases"):
        for text in ("new_tokens:q=[3,1]", "context_chunk:q=[2,1];kv=[0,7]"):
            drive(Case.parse(text))
    asked = [*CERTIFY, "--cases", tmp_path / "cases", "--out", tmp_path / "out"]
    told(0, *asked)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["cases"] == ["context_chunk:q=[2,1];kv=[0,7]", "new_tokens:q=[3,1]"]
    counts = {name: part["passed"] for name, part in report["backends"]["EAGER"]["capabilities"].items()}
    assert counts == {"context_chunk": 1, "new_tokens": 1}
    assert "no case of lse" in refused(*asked, "--capability", "lse")
    for folder, said in ((tmp_path, "no case file"), (tmp_path / "absent", "no such folder")):
        assert said in refused(*CERTIFY, "--cases", folder)


GOOD = Case.parse("lse:q=[1]").to_json()


def wrapped(**changes: object) -> str:
    return json.dumps({"id": "lse:q=[1]", "case": {**GOOD, **changes}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"case": {"format": 1, "capab', "not JSON (cut off?)"),
        ("[1]", "expected `object`, got `array`"),
        (wrapped(head=2), "unknown case field head"),
        (wrapped(capability="nope"), "unknown capability 'nope'"),
        (wrapped(q=[2]), "expected id 'lse:q=[2]' as the fields give it, got 'lse:q=[1]'"),
        (b"\xff\xfe", "expected UTF-8 text"),
    ],
)
def test_a_bad_case_file_is_named(tmp_path: Path, refused: Any, content: str | bytes, said: str) -> None:
    write_case(tmp_path / "good.json", Case.parse("lse:q=[1]"))
    bad = tmp_path / "bad.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(*CERTIFY, "--cases", tmp_path, "--out", tmp_path / "out")
    assert str(bad) in message and said in message and not (tmp_path / "out").exists()
