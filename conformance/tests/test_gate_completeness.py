"""The gate knows the whole: what it was not shown closes it, by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_conformance.cases.sharding import Shard
from mla_conformance.cli import main
from mla_conformance.files.inputs import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.reports import write_run
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

SMOKE = [case.id for entry in CAPABILITIES.values() for case in entry.select(Tier.SMOKE)]
FULL = sum(len(entry.cases) for entry in CAPABILITIES.values())
TWO = [case.id for name in ("new_tokens", "lse") for case in CAPABILITIES[name].cases]
Gate = Callable[..., tuple[int, str, str]]


def passed(cases: list[str], backend: str = "MINE") -> list[Record]:
    return [Record(backend, backend, case.partition(":")[0], case, Status.PASS) for case in cases]


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Path]:
    """Writes a report of some backends, or of one shard, or of a backend that could not be judged."""

    def write(
        name: str, *records: Record, shard: Shard | None = None, gone: str = "", suite: str = SUITE_VERSION
    ) -> Path:
        absent = [BackendFacts(gone, gone, ("no such GPU",))] if gone else []
        return write_run(tmp_path / name, records, TWO if shard else (), absent, shard, suite=suite)

    return write


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Gate:
    def run(*arguments: Path | str) -> tuple[int, str, str]:
        status = main(["gate", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_two_capabilities_of_all_do_not_open_the_gate(report: Callable[..., Path], gate: Gate) -> None:
    file = report("a.json", *passed(TWO))
    status, out, _ = gate(file)
    extent = f"{len(TWO)} of {FULL} cases, 2 of {len(CAPABILITIES)} capabilities"
    assert status == 1 and f"not run          MINE {extent} · of the full tier\n" in out
    assert out.endswith(f" · {len(TWO)} verdicts · {FULL - len(TWO)} not run\n")
    reported = {line.split()[3] for line in out.splitlines() if "without a verdict" in line}
    reported |= set(next(line for line in out.splitlines() if "… and" in line).partition(": ")[2].split(", "))
    assert reported == CAPABILITIES.keys() - {"new_tokens", "lse"}
    assert gate(file, "--require-tier", "none")[0] == 0


def test_a_tier_is_asked_for_by_what_it_holds(report: Callable[..., Path], gate: Gate) -> None:
    file = report("a.json", *passed(SMOKE))
    assert gate(file, "--require-tier", "smoke")[0] == 0
    status, out, _ = gate(file)
    assert status == 1 and f"{len(SMOKE)} of {FULL} cases" in out


def test_each_backend_needs_the_whole(report: Callable[..., Path], gate: Gate) -> None:
    file = report("a.json", *passed(SMOKE), *passed(SMOKE[1:], "OTHER"))
    status, out, _ = gate(file, "--require-tier", "smoke")
    assert status == 1 and f"OTHER {len(SMOKE) - 1} of {len(SMOKE)} cases" in out and "MINE" not in out


@pytest.mark.parametrize(
    ("required", "said"),
    [
        (["MINE"], ""),
        (["MINE", "DIED"], "missing          DIED * · in no report"),
        (["GONE"], "missing          GONE * · unavailable: no such GPU"),
        (["REFUSES"], "missing          REFUSES * · nothing of it was judged"),
        (["MINE", "package.module:DIED"], "missing          DIED * · in no report"),
    ],
)
def test_a_backend_that_has_to_be_judged(
    report: Callable[..., Path], gate: Gate, required: list[str], said: str
) -> None:
    refuses = [record.with_fields(status=Status.UNSUPPORTED) for record in passed(TWO[:2], "REFUSES")]
    file = report("a.json", *passed(TWO[:2]), *refuses, gone="GONE")
    status, out, _ = gate(file, "--require-tier", "none", "--require", *required)
    assert (status, [line for line in out.splitlines() if "missing  " in line]) == (bool(said), [said] if said else [])


def test_a_report_that_no_job_left_is_named_and_the_others_are_judged(report: Callable[..., Path], gate: Gate) -> None:
    file = report("a.json", passed(TWO)[0].with_fields(status=Status.FAIL, check="lse"))
    status, out, _ = gate(file, file.with_name("b.json"), "--require-tier", "none")
    assert status == 1 and f"missing          *    {file.with_name('b.json')} · no such report" in out
    assert f"failing          MINE {TWO[0]}" in out
    status, out, _ = gate(file.with_name("*.jsn"))
    assert status == 1 and "*.jsn · no such report" in out and "nothing was judged" in out


def test_a_shard_that_is_not_there_is_named(report: Callable[..., Path], gate: Gate) -> None:
    shards = [Shard.of(f"{index}/3", TWO) for index in (1, 2, 3)]
    files = [report(f"{shard.index}.json", *passed(list(shard.cases)), shard=shard) for shard in shards]
    assert gate(*files, "--require-tier", "none")[0] == 0
    status, out, _ = gate(files[0], files[2], "--require-tier", "none")
    assert status == 1 and "missing          MINE shard 2/3 · in no report" in out
    assert f"MINE {len(TWO) - len(shards[1].cases)} of {len(TWO)} cases, 0 of 2 capabilities · of its list" in out


def test_the_must_pass_list_is_asked_for_by_name_and_version(report: Callable[..., Path], gate: Gate) -> None:
    file, old = report("a.json", *passed(TWO)), report("old.json", *passed(TWO), suite="2025.1")
    for name in ("shipped", "decode"):
        status, out, _ = gate(file, "--require-tier", "none", "--must-pass", f"{name}@{SUITE_VERSION}")
        assert status == 1 and f" · must-pass {name}@{SUITE_VERSION} · " in out
    status, _, err = gate(file, "--must-pass", "core@2025.1")
    assert status == 2 and f"--must-pass core@2025.1: the list that is installed here is core@{SUITE_VERSION}" in err
    status, _, err = gate(old, "--require-tier", "none", "--must-pass", "core")
    assert (
        status == 2
        and f"core@{SUITE_VERSION} is of suite {SUITE_VERSION} here, but the report is of suite 2025.1" in err
    )
    assert gate(old)[0] == 2 and gate(old, "--require-tier", "none", "--allow-suite", "2025.1")[0] == 0
    status, _, err = gate(file, "--must-pass", "nope")
    assert status == 2 and "--must-pass nope: expected a file, shipped, or profiles that" in err


def test_a_profile_that_is_named_binds_whatever_is_declared() -> None:
    decodes = MustPass.of_suite().profiles["decode"]
    refused = {case: Record("B", "B", "decode", case, Status.UNSUPPORTED) for case in decodes}
    asked = MustPass.asked(["decode"])
    assert [case for case, _ in asked.missing(refused)] == list(decodes)
    assert {why.partition(":")[0] for _, why in asked.missing({})} == {"decode"}
    both = MustPass.asked(["shipped", "decode"])
    assert dict(both.missing(refused)).keys() > set(decodes)
    with pytest.raises(InputError):
        MustPass.asked(["decode", "absent.txt"])


def test_a_report_cannot_say_that_less_is_the_whole(report: Callable[..., Path], gate: Gate) -> None:
    """The list, the tier and the shard are what the report says of itself; the gate asks the suite."""
    file = report("a.json", *passed(TWO))
    claimed = json.loads(file.read_text())
    claimed["environment"]["tier"] = "nightly"
    file.write_text(json.dumps(claimed))
    assert gate(file)[0] == 1
