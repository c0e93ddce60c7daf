"""The script: inputs, call, reference, budget and comparison of one call, in at most 120 lines."""

import ast
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends.interpreted import ENVIRONMENT, InterpretedKernel
from mla_conformance.backends.platform import describe_device
from mla_conformance.export.budget import budget_lines
from mla_conformance.export.call import written_call
from mla_conformance.export.failing import Reproduced
from mla_conformance.export.inputs import LAID_OUT, UNPACKED, input_lines, require_equal
from mla_conformance.export.literals import NotWritable, TooLong, assigned
from mla_conformance.export.own import OwnClass, own_class
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.roles.decode.call import DecodeCall
from mla_conformance.version import __version__

MOST_LINES = 120
EXPORTED_BY = "Exported by mla-conformance"
"""What tells a script of ours from somebody's file."""
_HELPERS = {"laid_out(": LAID_OUT, "unpacked(": UNPACKED}
_STANDARD = {"base64.": "base64", "zlib.": "zlib", "os.": "os", "importlib.": "importlib.util"}
_WIDTH = 118


def script_of(found: Reproduced, path: Path) -> str:
    """The text of the script that stands at ``path``.

    Raises:
        NotWritable: something of it cannot be written down.
        TooLong: not in so many lines.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    own = own_class(found.subject, found.subject.class_of(found.problem.case.role))
    if own is not None and own.path == path.resolve():
        raise NotWritable(f"{path} is the backend itself; give the script another name")
    loader = PackageLoader("mla_conformance.export", ".")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.get_template("script.py.j2").render(**_parts(found, own, path))
    lines = [line.rstrip() for line in text.splitlines()]
    if len(lines) > MOST_LINES:
        raise TooLong(f"the script would have {len(lines)} lines, more than {MOST_LINES}")
    ast.parse(text)
    return "\n".join(lines) + "\n"


def _parts(found: Reproduced, own: OwnClass | None, path: Path) -> dict[str, Any]:
    """What the template is filled with."""
    call, locations = found.call, {"QUERIES": found.call.query_start_loc, "KEYS": found.call.key_start_loc}
    written = written_call(found, own)
    program = written.program
    inputs = input_lines(found.problem.case, call, written.tensors, program.used)
    require_equal(inputs, written.tensors, program.used, DEVICE=str(found.problem.device), **locations)
    loads = [*_environment(found), *(own.load_lines(path) if own else [])]
    text = "\n".join([*inputs, *loads, *program.lines])
    helpers = [helper.strip() for name, helper in _HELPERS.items() if name in text]
    return {
        "told": _told(found),
        "imports": sorted({"sys"} | {name for use, name in _STANDARD.items() if use in "\n".join([text, *helpers])}),
        "uses_paths": "Path(" in text,
        "uses_namespaces": "SimpleNamespace(" in text,
        "uses_mocks": "MagicMock(" in text,
        "needs": json.dumps(f"(needs {', '.join(['torch', *_needs(found, own)])})", ensure_ascii=False),
        "loads": loads,
        "modules": {} if own and own.path else program.modules,
        "device": found.problem.device.type,
        "scale": repr(found.problem.case.softmax_scale),
        "causal": call.question().causal,
        "bounds": assigned({name: str(list(starts)) for name, starts in locations.items()}),
        "excused": list(found.excused),
        "helpers": helpers,
        "budget": budget_lines(found),
        "inputs": inputs,
        "call": program.lines,
        "operands": _operands(call),
        "codes_scale": repr(float(call.k_scale)) if isinstance(call, DecodeCall) and call.holds_codes else "",
        "judges_lse": call.judges_lse,
        "output": program.results[0],
        "lse": program.results[-1],
    }


def _told(found: Reproduced) -> list[str]:
    """What the first lines say."""
    versions = ", ".join(f"{name} {version}" for name, version in found.subject.versions().items())
    failed, device = found.verdict.status is Status.FAIL, describe_device(found.problem.device)
    head = f"{'A wrong' if failed else 'A right'} result of {found.subject.name}{f', {versions}' if versions else ''}."
    told = [
        found.verdict.message if failed else "The suite finds no fault with it.",
        *([f"Looks like: {found.looks_like}"] if found.looks_like else []),
        *([f"Called here: {found.call.name} alone, on other operands than the case's."] if found.is_redrawn else []),
        f"{EXPORTED_BY} {__version__} on {device}, torch {torch.__version__}.",
        "Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.",
    ]
    return [*_wrapped(head), f"Case {found.case.id}", *(line for part in told for line in _wrapped(part))]


def _wrapped(text: str) -> list[str]:
    """A text in lines of a docstring; what is copied, such as the name of an issue, stays whole."""
    plain = text.replace("\\", "/").replace('"', "'")
    return textwrap.wrap(plain, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _environment(found: Reproduced) -> list[str]:
    """What must be set before a library is imported."""
    interpreted = issubclass(found.subject.class_of(found.problem.case.role), InterpretedKernel)
    return [f"os.environ.update({ENVIRONMENT})".replace("'", '"')] if interpreted else []


def _needs(found: Reproduced, own: OwnClass | None) -> Sequence[str]:
    if own is not None:
        return [own.path.name if own.path else own.module]
    return [name for name in found.subject.declaration_of(found.problem.case.role).distributions if name != "torch"]


def _operands(call: AttentionCall) -> str:
    """Queries, keys and values of the request in rows a:b and c:d."""
    if not isinstance(call, DecodeCall):
        return "q[a:b], k[c:d], v[c:d]"
    return f"queries[a:b], key := latents[c:d, None], key[..., :{call.ql_nope.shape[-1]}]"
