"""``bump``: two environments, a run of ``certify`` in each, and one answer."""

import argparse
import secrets
import time
from collections.abc import Sequence

from mla_conformance.backends.references import parse_reference
from mla_conformance.bump.environment import Environment
from mla_conformance.bump.outcome import Bump, JudgedVersion, bump_lines, bump_markdown
from mla_conformance.bump.version import two_versions
from mla_conformance.engine.folder import RUNS
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.report.json_report import load_report
from mla_conformance.report.terminal import say

_SIDES = "before", "after"
_NO_DEVICE = "compute capability"
_JUDGED = (0, 1, 3)  # the statuses with which ``certify`` leaves a report


def bump(options: argparse.Namespace) -> int:
    pins = two_versions(options.before, options.after)
    if not options.backend:
        raise InputError(f"--backend: expected the backends that stand on {pins[0].name}, got none")
    _require_device(options)
    out = options.out or RUNS / f"bump-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InputError(f"--out {out}: expected a new or an empty folder")
    except OSError as error:
        raise InputError(f"--out {out}: expected a writable folder: {error.strerror}") from error
    # Both before anything is judged: a version that cannot be installed is known at once.
    environments = []
    for side, pin in zip(_SIDES, pins, strict=True):
        say(f"installing {pin}")
        environments.append(Environment.make((out / side).resolve() / "environment", pin, options.find_links))
        environments[-1].require_installed()
    names = list(dict.fromkeys([pins[0].name, *environments[0].added, *environments[1].added]))
    found = Bump(*(_judged(environment, names, options) for environment in environments))
    for line in bump_lines(found):
        say(line)
    say(f"reports {out / _SIDES[0]} {out / _SIDES[1]}")
    if options.markdown:
        write_output(options.markdown, bump_markdown(found))
    return found.exit_status


def _require_device(options: argparse.Namespace) -> None:
    """Refuse a backend that has no kernel for the device here, before minutes of installing."""
    from mla_conformance.backends.kernel import get_device_capability
    from mla_conformance.backends.loading import unavailable_reasons  # with torch
    from mla_conformance.engine.machine import find_device

    device = find_device(options.device or "")
    if device is None:
        raise InputError(f"--device {options.device}: torch finds no such device here; nothing was installed")
    for backend in map(parse_reference, options.backend):
        found = [unavailable_reasons(backend, get_device_capability(device), each.role) for each in backend.members()]
        lacking = [next((reason for reason in reasons if _NO_DEVICE in reason), "") for reasons in found]
        if lacking and all(lacking):
            raise InputError(f"--backend {backend.name}: {lacking[0]}; nothing was installed")


def _judged(environment: Environment, names: Sequence[str], options: argparse.Namespace) -> JudgedVersion:
    """One version, judged by ``certify`` in the folder that holds its environment."""
    pin, folder = environment.pin, environment.folder.parent
    say(f"judging with {pin}")
    asked = {"backend": options.backend, "capability": options.capability}
    asked |= {name: [value] for name in ("tier", "device", "cases") if (value := getattr(options, name))}
    selection = [f"--{name}={value}" for name, values in asked.items() for value in values]
    selection += ["--speed"] if options.speed else []
    status = environment.run("mla_conformance", "certify", *selection, "--out", str(folder)).returncode
    if status not in _JUDGED:
        raise InputError(f"certify with {pin} ended with status {status}")
    versions = {name: found.version for name, found in environment.find(names).items()}
    judged = JudgedVersion(pin, load_report(folder), versions)
    judged.require_loaded()
    return judged
