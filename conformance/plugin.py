"""The pytest plugin: options, selection by backend, parametrisation, and the ``trial`` fixture.

It is loaded in every pytest run of its environment, so nothing here imports torch before the suite is
collected or one of its options is given.
"""

import os
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mla_conformance.isolation import limits
from mla_conformance.isolation.devices import take_place, use_gpu, use_jit_cache
from mla_conformance.isolation.journal import Journal
from mla_conformance.isolation.watchdog import WORKERS_FOLDER, Watchdog
from mla_conformance.judging.record import EXPLORED
from mla_conformance.judging.verdict import Nonconformance, Status, Verdict
from mla_conformance.running.recording import Recorder, attach, identity, record_of

if TYPE_CHECKING:
    import torch

    from mla_conformance.driving.subject import Subject
    from mla_conformance.running.selection import Selection
    from mla_conformance.trials.explore import Exploration
    from mla_conformance.trials.trial import Trial

_SELECTION = pytest.StashKey["Selection"]()
_RECORDER = pytest.StashKey[Recorder]()
_SETTLED = pytest.StashKey[set[tuple[str, str, str]]]()
_TRIAL = pytest.StashKey["tuple[Trial, float]"]()
_EXPLORATION = pytest.StashKey["Exploration"]()
_WATCHDOG = pytest.StashKey[Watchdog]()
_KEYWORD = re.compile(r"""\bbackend\s*==?\s*(['"]?)([\w.+\[\]-]+)\1""")

_MEMORY_PATIENCE = 120.0
_REWRITTEN = re.compile(r"/backend:([^/]+)/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the conformance suite."""
    group = parser.getgroup("mla-conformance")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="judge this backend only: a name, package.module:Class or path/file.py:Class; may be repeated",
    )
    group.addoption("--mla-capability", action="append", default=[], metavar="NAME", help="judge this capability only")
    group.addoption("--mla-tier", default="full", metavar="TIER", help="smoke, full (default) or nightly")
    group.addoption(
        "--mla-device", default=None, metavar="DEVICE", help="cpu or cuda; by default cuda where there is one"
    )
    group.addoption("--mla-case", action="append", default=[], metavar="ID", help="run exactly this case id")
    group.addoption(
        "--mla-explore", type=int, default=0, metavar="N", help="draw N further cases for each backend (hypothesis)"
    )
    group.addoption("--mla-cases", default=None, metavar="FILE", help="run exactly the case ids of this file's lines")
    group.addoption("--mla-out", default=None, metavar="DIR", help="folder for the journal of the run")
    group.addoption(
        "--mla-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="end a worker whose case takes longer; needs --mla-out and workers (-n)",
    )
    group.addoption("--mla-gpus", default="", metavar="A,B", help="the GPUs that the workers divide among themselves")
    group.addoption("--mla-jit", default="", metavar="DIR", help="folder of the workers' caches of compiled kernels")
    group.addoption("--mla-memory", type=int, default=None, metavar="BYTES", help="memory that a worker may allocate")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and make ``-k backend=NAME`` legal."""
    config.addinivalue_line("markers", "backend(name): the backend that a conformance test judges")
    config.addinivalue_line("markers", "capability(name): the capability that a conformance test decides")
    config.addinivalue_line("markers", "explore: a conformance test that draws its cases; only with --mla-explore")
    if _selects(config.option) and not config.option.mla_out:
        # A mistake is a usage error here; during collection it would be an error of the suite. Where there is an output
        # folder, certify has checked the selection, and the controller of its workers does without torch.
        _selection(config)
    _rewrite_keyword(config)
    recorder = Recorder(Path(config.option.mla_out) if config.option.mla_out else None)
    config.stash[_RECORDER] = recorder
    _protect(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(recorder, "mla-conformance-recorder")


def _protect(config: pytest.Config) -> None:
    """A run with a folder leaves no process behind; its workers are limited in time and memory."""
    option = config.option
    if not option.mla_out:
        return
    limits.die_with_parent()
    if hasattr(config, "workerinput"):
        if option.mla_gpus:
            place = take_place(Path(option.mla_out) / WORKERS_FOLDER, int(config.workerinput["workercount"]))
            use_gpu(place, option.mla_gpus.split(","))
            use_jit_cache(Path(option.mla_jit) / str(place))
        if option.mla_memory:
            limits.limit_memory(option.mla_memory)
        if option.mla_timeout:
            config.stash[_WATCHDOG] = Watchdog.of(Path(option.mla_out), option.mla_timeout)


def _selects(option: Any) -> bool:
    chosen = (option.backend, option.mla_capability, option.mla_device, option.mla_case, option.mla_cases)
    return any(chosen) or option.mla_explore or option.mla_tier != "full"


def _rewrite_keyword(config: pytest.Config) -> None:
    """Turn ``backend=NAME`` into an identifier of pytest's own grammar; delimited, hence exact, and idempotent."""
    expression = config.option.keyword
    names = [match[2] for match in _KEYWORD.finditer(expression)]
    if not names:
        return
    from mla_conformance.running.selection import known_names

    known = known_names(config.option.backend)
    for name in names:
        if name not in known:
            raise pytest.UsageError(f"-k: unknown backend '{name}'; known backends: {', '.join(known)}")
    config.option.keyword = _KEYWORD.sub(lambda match: _keyword(match[2]), expression)


def _keyword(name: str) -> str:
    return f"/backend:{name}/"


def _backends(option: Any) -> list[str]:
    """The backends that were asked for; a ``NAME[variant]`` in the keyword joins the registered ones."""
    named = [match[2] for match in _KEYWORD.finditer(option.keyword)] + _REWRITTEN.findall(option.keyword)
    variants = [name for name in named if "[" in name]
    if option.backend or not variants:
        return list(option.backend)
    from mla_conformance.backends.references import known_backends

    return [backend.name for backend in known_backends()] + variants


def _selection(config: pytest.Config) -> "Selection":
    """What this run judges; made when an option selects, or else when the first suite test is collected."""
    if _SELECTION not in config.stash:
        from mla_conformance.running.selection import Selection, SelectionError

        option = config.option
        try:
            config.stash[_SELECTION] = Selection.of(
                _backends(option),
                option.mla_capability,
                option.mla_tier,
                option.mla_device,
                _cases(option),
                option.mla_explore,
            )
        except SelectionError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SELECTION]


def _cases(option: Any) -> list[str]:
    """The case ids that were asked for."""
    if not option.mla_cases:
        return list(option.mla_case)
    try:
        return [*option.mla_case, *Path(option.mla_cases).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise pytest.UsageError(f"--mla-cases {option.mla_cases}: {error.strerror}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a suite test over the selected cases and backends, a case's backends side by side."""
    definition, wanted = metafunc.definition, metafunc.fixturenames
    marker = definition.get_closest_marker("capability")
    if marker is not None and "trial" in wanted:
        metafunc.parametrize("trial", _trials(metafunc.config, marker.args[0]), indirect=True)
    if definition.get_closest_marker("explore") is not None and "exploration" in wanted:
        metafunc.parametrize("exploration", _explorations(metafunc.config), indirect=True)


def _trials(config: pytest.Config, capability: str) -> list[Any]:
    settled = _settled(config)
    return [
        _param((subject, case), f"{case.id}-", subject, why)
        for subject, case, why in _selection(config).pairs(capability)
        if (subject.backend.reference, capability, case.id) not in settled
    ]


def _explorations(config: pytest.Config) -> list[Any]:
    settled = {reference for reference, capability, _ in _settled(config) if capability == EXPLORED}
    return [
        _param(subject, "", subject, why)
        for subject, why in _selection(config).explored()
        if subject.backend.reference not in settled
    ]


def _param(value: Any, prefix: str, subject: "Subject", unavailable: str) -> Any:
    marks: list[Any] = [pytest.mark.backend(name=subject.name)]
    if unavailable:
        marks.append(pytest.mark.skip(reason=f"{subject.name} unavailable: {unavailable}"))
    return pytest.param(value, id=f"{prefix}backend={subject.name}", marks=marks)


def _settled(config: pytest.Config) -> set[tuple[str, str, str]]:
    """What a resumed run has verdicts of already."""
    if _SETTLED not in config.stash:
        folder = config.option.mla_out
        config.stash[_SETTLED] = Journal.inside(Path(folder)).settled() if folder else set()
    return config.stash[_SETTLED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the suite's tests that the selection leaves without a case; pytest would count each as skipped."""
    empty = [item for item in items if _is_suite_test(item) and item.get_closest_marker("backend") is None]
    if empty:
        items[:] = [item for item in items if item not in empty]
        config.hook.pytest_deselected(items=empty)


def _is_suite_test(item: pytest.Item) -> bool:
    kinds = (("capability", "trial"), ("explore", "exploration"))
    wanted = getattr(item, "fixturenames", ())
    return any(item.get_closest_marker(marker) is not None and fixture in wanted for marker, fixture in kinds)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let ``-k`` find an item by the exact name of its backend."""
    marker = item.get_closest_marker("backend")
    if marker is not None:
        item.extra_keyword_matches.add(_keyword(marker.kwargs["name"]))


@pytest.fixture
def trial(request: pytest.FixtureRequest) -> Iterator["Trial"]:
    """The subject and case of a suite test."""
    from mla_conformance.cases.capabilities import find_capability
    from mla_conformance.trials.trial import Trial

    subject, case = request.param
    current = Trial(subject, case)
    request.config.stash[_RECORDER].start(request.node, identity(current))
    request.node.stash[_TRIAL] = (current, time.perf_counter())
    probes_refusals = find_capability(case.capability).probes_refusals
    try:
        (current.require_role if probes_refusals else current.require_support)()
    except Nonconformance as unsupported:
        if current.verdict.status is not Status.UNSUPPORTED:
            raise
        pytest.skip(f"{subject.name} unsupported: {unsupported}")
    _disarm(request.config)  # to wait for what others hold is not the backend's time
    try:
        current.require_memory(_MEMORY_PATIENCE)
    except Nonconformance as lacking:
        pytest.skip(f"{subject.name} unavailable: {lacking}")
    _arm(request.config)
    yield current


@pytest.fixture
def exploration(request: pytest.FixtureRequest) -> "Exploration":
    """The drawn cases of a subject; the item's trial is the one that was started last."""
    from mla_conformance.trials.explore import Exploration

    def start(current: "Trial") -> None:
        record = replace(identity(current), capability=EXPLORED)
        request.config.stash[_RECORDER].start(request.node, record)
        request.node.stash[_TRIAL] = (current, time.perf_counter())
        _arm(request.config)  # each drawn case has the time of one

    selection = _selection(request.config)
    found = Exploration(request.param, selection.explore, selection.drawn, start)
    request.node.stash[_EXPLORATION] = found
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[pytest.TestReport | None]:
    """Attach the record of a finished trial to its report."""
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    if _TRIAL in item.stash and (call.when == "call" or (call.when == "setup" and call.excinfo is not None)):
        current, started = item.stash[_TRIAL]
        seconds, evidence = time.perf_counter() - started, current.evidence()
        _disarm(item.config)  # nothing more is asked of the backend, and an explanation takes its time
        record = record_of(report, current, call.excinfo, seconds, evidence)
        attach(report, item.stash[_EXPLORATION].described(record) if _EXPLORATION in item.stash else record)
    return report  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A process that hangs, or has lost its GPU context or its memory, judges nothing more; a worker is replaced."""
    _arm(item.config)
    result = yield
    _disarm(item.config)
    if _TRIAL in item.stash:
        trial, _ = item.stash[_TRIAL]
        device, verdict = trial.subject.device, trial.verdict
        del trial, item.stash[_TRIAL]  # pytest keeps its items to the end, and a trial keeps tensors
        _retire(item.config, device, verdict)
    return result


def _arm(config: pytest.Config) -> None:
    if _WATCHDOG in config.stash:
        config.stash[_WATCHDOG].arm()


def _disarm(config: pytest.Config) -> None:
    if _WATCHDOG in config.stash:
        config.stash[_WATCHDOG].disarm()


def _retire(config: pytest.Config, device: "torch.device", verdict: Verdict) -> None:
    """End a process that cannot judge further cases; one that is nobody's worker does without memory it has lost."""
    from mla_conformance.running.retirement import Retirement, retirement

    reason = retirement(device, verdict, config.option.mla_memory)
    if reason is not None and hasattr(config, "workerinput"):
        os._exit(reason)
    if reason is Retirement.DEVICE_LOST:
        pytest.exit("a kernel destroyed the GPU's context; with -n 1 the run goes on in a new process", reason)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Backends that were asked for by name and could not be judged are no success; a worker that has told all ends."""
    option = session.config.option
    meant = option.backend and not option.collectonly
    if meant and exitstatus == pytest.ExitCode.OK and _judged_nothing(session.config):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    result = yield
    if option.mla_out and hasattr(session.config, "workerinput"):
        limits.leave(int(session.exitstatus))  # the run waits for it
    return result


def _judged_nothing(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput") and not config.stash[_RECORDER].records


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The verdict of each backend, by capability."""
    records = terminalreporter.config.stash[_RECORDER].records
    if records:
        from mla_conformance.report.terminal import capability_lines

        terminalreporter.section("mla-conformance")
        for line in capability_lines(records):
            terminalreporter.write_line(line)
