"""The pytest plugin, a view of the suite: selection by backend, ids, and each test's record in pytest's own reports.

It is loaded in every pytest run of its environment, so nothing here imports torch before the suite is collected.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from copy import copy
from glob import glob
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from mla_conformance.api import own_tests
from mla_conformance.diagnosis import UNEXPLAINED
from mla_conformance.judging.record import Record, Status
from mla_conformance.report.terminal import counted, shown_lines

if TYPE_CHECKING:
    from mla_conformance.engine.beside import Judging
    from mla_conformance.engine.request import RunRequest

SUITE, TIER = "mla_conformance.suite", "mla_tier"
_NOTHING, _SMOKE = "none", "smoke"
_REQUEST = pytest.StashKey["RunRequest"]()
_JUDGING: "pytest.StashKey[Judging]" = pytest.StashKey()
_RECORD = pytest.StashKey[Record]()
_RECORDS = pytest.StashKey[list[Record]]()
_LAST_WORD = pytest.StashKey[Callable[[int], Any]]()  # takes the exit status, where a parent waits for it
_KEYWORD = re.compile(r"""\bbackend\s*==?\s*(['"]?)([\w.+\[\]-]+)\1""")
_OPEN_ENDED = re.compile(r"\b(or|not)\b")
_REWRITTEN = re.compile(r"/backend:([^/]+)/")
_BARE = re.compile(r"(?<![\w=/:'\"\[.-])[A-Z][A-Z0-9_]{2,}(?:\[[\w.-]+\])?(?![\w/.-])")
"""What may be a backend's name that stands alone."""
_WORD = re.compile(r"(?<![\w/:=\[.-])\w+(?![\w/:=\].-])")
_KIND = re.compile(r"/of:(\w+)/")
_keyword, _kind = "/backend:{}/".format, "/of:{}/".format
_SHORT = ("--tier", "--capability", "--device", "--case", "--no-explain")
_SECONDS = 0.16
"""CPU seconds of TORCH_SDPA on all cases and those that are fitted to it, by the number of all: 612 of 3,942."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla-conformance")
    reference = "judge this backend only: a name, package.module:Class or path/file.py:Class; may be repeated"
    group.addoption("--backend", "--mla-backend", action="append", default=[], metavar="NAME", help=reference)
    group.addoption("--mla-capability", action="append", default=[], metavar="NAME", help="judge this capability only")
    group.addoption("--mla-tier", default=None, metavar="TIER", help="smoke (default), full or nightly")
    group.addoption("--mla-device", default=None, metavar="DEVICE", help="cpu or cuda; by default cuda if there is one")
    group.addoption("--mla-case", action="append", default=[], metavar="ID", help="run exactly this case id")
    said = "compare failures with no known mistakes, which takes seconds; "
    said += "with --backend, or for the suite, --tier and the like need no prefix either"
    group.addoption("--mla-no-explain", action="store_true", help=said)
    parser.addini(TIER, "tier of the conformance suite in a run that selects nothing of it, or none", default=_SMOKE)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Before any file of the project is imported; who asks for a backend's cases and names no file means the suite."""
    if early_config.known_args_namespace.help:  # of which nothing else is read, not even the paths
        return (yield)
    option = early_config.known_args_namespace = _without_prefix(early_config, parser, args)
    if (option.backend or _named(option)) and not option.file_or_dir:
        args += ["--pyargs", SUITE]
        option.file_or_dir, option.pyargs = [SUITE], True
    elif _is_watched(early_config):
        found = [path for each in early_config.getini("testpaths") for path in glob(each, recursive=True)]  # noqa: PTH207
        paths = option.file_or_dir or found or [str(early_config.invocation_params.dir)]
        if option.pyargs or own_tests.mentions(paths):
            early_config.stash[_LAST_WORD] = own_tests.give_way()
    return (yield)


def _without_prefix(config: pytest.Config, parser: pytest.Parser, args: list[str]) -> Any:
    """The options, of which those of the suite need no prefix where it is run, unless others have them."""
    _, unknown = parser.parse_known_and_unknown_args(args)

    def read(short: Collection[str]) -> tuple[list[str], Any]:
        meant = [word in unknown and word.partition("=")[0] in short for word in args]
        words = [f"--mla-{word[2:]}" if is_meant else word for word, is_meant in zip(args, meant, strict=True)]
        return words, parser.parse_known_args(words, copy(config.option))

    words, option = read(_SHORT)
    if SUITE not in option.file_or_dir and (option.file_or_dir or not (option.backend or _named(option))):
        words, option = read(("--no-explain",))
    args[:] = words
    return option


def _is_watched(config: pytest.Config) -> bool:
    """Whether this process runs tests itself, has begun nothing yet, and may be left to a child and its parent."""
    option = config.known_args_namespace
    here = not (getattr(option, "numprocesses", None) or getattr(option, "tx", None) or option.collectonly)
    begun = "torch" in sys.modules or threading.active_count() > 1 or not own_tests.is_main_program()
    return sys.platform == "linux" and here and not (begun or option.help or option.version or own_tests.is_alone())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    status = yield
    if said := config.stash.get(_LAST_WORD, None):
        said(int(status or 0))
    return status


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backend(name): the backend that a conformance test judges")
    config.addinivalue_line("markers", "capability(name): the capability that a conformance test decides")
    config.addinivalue_line("markers", "role(name): the role of a conformance test's case, such as decode")
    if config.option.mla_no_explain:
        os.environ[UNEXPLAINED] = "1"
        config.add_cleanup(lambda: os.environ.__delitem__(UNEXPLAINED))
    config.pluginmanager.register(own := own_tests.OwnTests(config))
    config.stash[_RECORDS] = own.of_suite
    if config.option.help:
        return
    if _selects_any(config, by_keyword=False):
        _request(config)  # a mistake is a usage error here; during collection it would be an error of the suite
    _rewrite_keyword(config)


def _spelled(option: Any) -> str:
    """The expression of -k, with ``backend=`` before each name of a backend where it can only be meant so."""
    expression: str = option.keyword
    if (option.file_or_dir or [SUITE]) != [SUITE] or not _BARE.search(expression):
        return expression
    from mla_conformance.engine.request import known_names

    known = known_names()
    return _BARE.sub(lambda match: f"backend={match[0]}" if match[0] in known else match[0], expression)


def _named(option: Any) -> list[str]:
    expression = _spelled(option)
    return [match[2] for match in _KEYWORD.finditer(expression)] + _REWRITTEN.findall(expression)


def _selects_any(config: pytest.Config, by_keyword: bool = True) -> bool:
    option = config.option
    asked = (option.backend, option.mla_capability, option.mla_device, option.mla_case, option.mla_tier)
    return any(asked) or (by_keyword and bool(_named(option)))


def _rewrite_keyword(config: pytest.Config) -> None:
    """Turn ``backend=NAME`` into an identifier of pytest's own grammar; delimited, hence exact, and idempotent.

    Beside a backend a role or a capability is exact, too: ``decode`` is no case with ``decodes=2``.
    """
    expression = _spelled(config.option)
    names = [match[2] for match in _KEYWORD.finditer(expression)]
    if not names:
        return
    from mla_conformance.backends import references, roles
    from mla_conformance.engine.request import known_names

    known = known_names(config.option.backend)
    for name in names:
        if name not in known:
            raise pytest.UsageError(f"-k: {references.unknown('backend', name, known, 'mla-conformance backends')}")
    from mla_conformance.vocabulary.capabilities import CAPABILITIES

    exact = _KEYWORD.sub(lambda match: _keyword(match[2]), expression)
    kinds = {*CAPABILITIES, *roles.ROLES}
    config.option.keyword = _WORD.sub(lambda match: _kind(match[0]) if match[0] in kinds else match[0], exact)


def _request(config: pytest.Config) -> "RunRequest":
    if _REQUEST not in config.stash:
        from mla_conformance.backends.references import BackendReferenceError, known_backends
        from mla_conformance.cases.case import CaseError
        from mla_conformance.engine.request import RunRequest
        from mla_conformance.files.whole import InputError

        option = config.option
        named, default = _named(option), config.getini(TIER)
        if _OPEN_ENDED.search(option.keyword):  # any other one may be meant as well
            variants = [name for name in named if "[" in name]
            named = [*(backend.name for backend in known_backends()), *variants] if variants else []
        tier = option.mla_tier or (_SMOKE if _selects_any(config) and default == _NOTHING else default)
        try:
            asked = option.mla_capability, tier, option.mla_device, option.mla_case
            config.stash[_REQUEST] = RunRequest.of(option.backend or named, *asked)
        except (InputError, BackendReferenceError, CaseError) as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_REQUEST]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mla_judge" in metafunc.fixturenames:
        judged = _selects_any(metafunc.config) or metafunc.config.getini(TIER) != _NOTHING
        metafunc.parametrize("mla_judge", list(_params(metafunc.config)) if judged else [], indirect=True)


def _params(config: pytest.Config) -> Iterator[Any]:
    """Every case with every backend; one that cannot run here stands with its first case only."""
    from mla_conformance.engine import beside, supervisor

    request, reasons = _request(config), dict[str, tuple[str, ...]]()
    if not config.option.collectonly:  # which need not know what can run here, and takes a third of the time without
        judging = config.stash[_JUDGING] = beside.Judging(tuple(x.reference for x in request.backends), request.device)
        config.add_cleanup(judging.end)
        _ = request.case_ids  # while torch is imported
        try:
            reasons = judging.reasons
        except supervisor.RunError as error:
            raise pytest.UsageError(str(error)) from error
    for name in request.capabilities:
        for index, case in enumerate(request.cases_of(name)):
            for backend in request.backends:
                if index == 0 or not reasons.get(backend.reference):
                    kinds = pytest.mark.capability(name=name), pytest.mark.role(name=str(case.role))
                    marks = [pytest.mark.backend(name=backend.name), *kinds]
                    yield pytest.param((backend, case.id), id=f"{case.id}-backend={backend.name}", marks=marks)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Of a run of the smoke tier, which is the default, how much there is besides."""
    request = config.stash.get(_REQUEST, None)
    if request is None or request.cases or request.tier != _SMOKE:
        return []
    from mla_conformance.vocabulary.capabilities import CAPABILITIES

    cases = sum(len(CAPABILITIES[name].cases) for name in request.capabilities)
    taken = f"about {counted(max(1, round(cases * _SECONDS / 60)), 'minute')} of a CPU core for TORCH_SDPA"
    return [f"mla-conformance: the smoke tier, {len(request.case_ids)} cases; --tier full has {cases:,}: {taken}"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let ``-k`` find an item by the exact name of its backend, its capability and its role."""
    marker = item.get_closest_marker("backend")
    if marker is not None and "name" in marker.kwargs:
        kinds = (item.get_closest_marker(kind) for kind in ("capability", "role"))
        item.extra_keyword_matches.add(_keyword(marker.kwargs["name"]))
        item.extra_keyword_matches.update(_kind(kind.kwargs["name"]) for kind in kinds if kind)
        return
    for word in _KIND.findall(item.config.option.keyword):  # another test is found as ever
        if any(word in each.name.lower() for each in item.listchain()):
            item.extra_keyword_matches.add(_kind(word))


@pytest.fixture
def mla_judge(request: pytest.FixtureRequest) -> Callable[[], Record]:
    backend, case = request.param
    judging = request.config.stash[_JUDGING]
    if reasons := judging.reasons[backend.reference]:
        pytest.skip(f"{backend.name} unavailable: {'; '.join(reasons)}")

    def judged() -> Record:
        record = judging.judge(backend.reference, case)
        request.node.stash[_RECORD] = record
        if record.status in (Status.UNSUPPORTED, Status.UNAVAILABLE):
            pytest.skip(f"{backend.name} {record.status}: {record.message}")
        return record

    return judged


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Generator[None, Any, Any]:
    """Attach the record of a finished trial to its report, and its sentence in place of a traceback."""
    report = yield
    if call.when == "call" and _RECORD in item.stash:
        record = item.stash[_RECORD]
        del item.stash[_RECORD]
        if record.failed and record.status is not Status.HARNESS_ERROR:
            failed = f"FAIL {record.backend} {record.capability} · case {record.case} · {record.message}"
            report.longrepr = shown_lines("\n     ".join((failed, *record.remarks, f"replay: {record.replay}")))
        report.user_properties.append((own_tests.OF_SUITE, json.dumps(msgspec.to_builtins(record))))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Backends that were asked for by name and could not be judged are no success."""
    option, config = session.config.option, session.config
    meant = option.backend and not option.collectonly and not hasattr(config, "workerinput")
    if meant and exitstatus == pytest.ExitCode.OK and not config.stash[_RECORDS]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    records = terminalreporter.config.stash[_RECORDS]
    if records:
        from mla_conformance.report.outcome import capability_lines

        terminalreporter.section("mla-conformance")
        for line in capability_lines(records, terminalreporter.verbosity > 0):
            terminalreporter.write_line(line)
