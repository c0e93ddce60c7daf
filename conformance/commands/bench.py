"""``bench``: time and memory of the golden pass and of the suite, as ratios."""

import argparse
from collections.abc import Iterator
from itertools import chain

import torch

from mla_conformance.bench import fences, runs, suite
from mla_conformance.commands.options import require_tests
from mla_conformance.engine.describe import device_facts, find_device
from mla_conformance.engine.limits import machine_cores
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.supervisor import RunError
from mla_conformance.files.inputs import InputError
from mla_conformance.files.places import search_current_folder
from mla_conformance.report.terminal import say
from mla_conformance.trials.subject import Subject
from mla_conformance.version import SUITE_VERSION


def run_bench(options: argparse.Namespace) -> int:
    """Measure what was asked for, and say it; the exit status."""
    backends = options.runs or ([options.suite] if options.suite else [])
    request = RunRequest.of(
        backends, options.capability, options.tier, options.device, options.case, apart=options.apart
    )
    device = find_device(request.device)
    if device is None:
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu")
    search_current_folder()
    _require_available(request if backends else None, device)
    where, lines = device_facts(device), _lines(options, request, device)
    say(f"device {where['device']} · torch {where['torch']} · {machine_cores()} cores · suite {SUITE_VERSION}")
    try:
        for line in lines:
            say(line)
    except RunError as error:
        raise InputError(str(error)) from error
    return 0


def _lines(options: argparse.Namespace, request: RunRequest, device: torch.device) -> Iterator[str]:
    if options.kernels:
        return suite.throughput(device)
    if options.suite:
        return chain(suite.split(request, device), _fences(request, device))
    if options.runs:
        return runs.compare_runs(request, device)
    require_tests("bench of the golden pass")
    from mla_conformance.tests.bench import golden

    if options.scale:
        return golden.scale(device.type)
    if options.sparse:
        return golden.sparse(device.type)
    return chain(golden.compare(device.type), suite.plugin_cost())


def _fences(request: RunRequest, device: torch.device) -> Iterator[str]:
    """Where nothing but the cases over fenced memory was asked for, what the fences cost."""
    if request.capabilities == (fences.CAPABILITY,):
        cases = request.cases_of(fences.CAPABILITY)
        yield from (line for each in request.backends for line in fences.cost(Subject(each, device), cases))


def _require_available(request: RunRequest | None, device: torch.device) -> None:
    for backend in request.backends if request else ():
        subject = Subject(backend, device)
        if subject.unavailable:
            raise InputError(f"{subject.name} cannot run here: {'; '.join(subject.unavailable)}")
