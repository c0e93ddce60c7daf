"""The script: inputs, call, reference, budget and comparison of one call, in few lines; and running it."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends.kernel import describe_device
from mla_conformance.backends.packaged import ENVIRONMENT, InterpretedKernel
from mla_conformance.export.failing import Reproduced
from mla_conformance.export.inputs import LAID_OUT, UNPACKED, input_lines, named_tensors, require_equal
from mla_conformance.export.own import OwnClass, own_class
from mla_conformance.export.program import NotWritable, Program, TooLong, assigned
from mla_conformance.export.recording import Handle, Recorder
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.judging.verdict import Status
from mla_conformance.reference.error_budget import FLOAT32_ROUNDOFF
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.table import DEFINITIONS
from mla_conformance.trials.subject import describe
from mla_conformance.version import __version__

MOST_LINES = 120  # beside those that load a kernel of the user's own, and stand in for the interface that it imports
EXPORTED_BY = "Exported by mla-conformance"  # what tells a script of ours from somebody's file
SECONDS = 600  # a library may compile for minutes at its first call
WRONG, RIGHT = "WRONG", "right"
_STATUS = {WRONG: 1, RIGHT: 0}
_HELPERS = {"laid_out(": LAID_OUT, "unpacked(": UNPACKED}
_STANDARD = {"base64.": "base64", "zlib.": "zlib", "os.": "os", "importlib.": "importlib.util"}
_WIDTH, _MARGIN = 118, 107
_ALONE = """
import os, runpy, sys
sys.modules["mla_conformance"] = None  # what imports it raises
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script_of(found: Reproduced, path: Path) -> str:
    """The text of the script that stands at ``path``, if it can be written down, and in so many lines."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    own = own_class(found.subject, found.subject.class_of(found.case.role))
    if own is not None and own.path == path.resolve():
        raise NotWritable(f"{path} is the backend itself; give the script another name")
    loader = PackageLoader("mla_conformance.export", ".")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    parts = _parts(found, own, path)
    text = environment.get_template("script.py.j2").render(**parts)
    lines = [line.rstrip() for line in text.splitlines()]
    counted = len(lines) - (len(parts["loads"]) if own else 0)
    if counted > MOST_LINES:
        raise TooLong(f"the script would have {counted} lines, more than {MOST_LINES}")
    return "\n".join(lines) + "\n"


def _parts(found: Reproduced, own: OwnClass | None, path: Path) -> dict[str, Any]:
    call, device = found.call, found.problem.device
    operands = "q[a:b], k[c:d], v[c:d]"
    if isinstance(call, DecodeCall):
        operands = f"queries[a:b], key := latents[c:d, None], key[..., :{call.ql_nope.shape[-1]}]"
    starts = {"QUERIES": call.query_start_loc, "KEYS": call.key_start_loc}
    program, tensors = _written_call(found, own)
    inputs = input_lines(found.problem.case, call, tensors, program.used)
    require_equal(inputs, tensors, program.used, DEVICE=str(device), **starts)
    loads = own.load_lines(path) if own else []
    if issubclass(found.subject.class_of(found.case.role), InterpretedKernel):  # set before a library is imported
        loads.insert(0, f"os.environ.update({ENVIRONMENT})".replace("'", '"'))
    text = "\n".join([*inputs, *loads, *program.lines])
    needs = dict.fromkeys(["torch", *(own.needs if own else found.subject.declared(found.case.role).distributions)])
    helpers = [helper.strip() for name, helper in _HELPERS.items() if name in text]
    used = {name for use, name in _STANDARD.items() if use in "\n".join([text, *helpers])}
    parts = {"found": found, "call": call, "program": program, "inputs": inputs, "helpers": helpers, "loads": loads}
    parts |= {"text": text, "reported": _reported(found), "imports": sorted({"sys"} | used), "device": device.type}
    parts["needs"] = json.dumps(f"(needs {', '.join(needs)})", ensure_ascii=False)
    parts["modules"] = {} if own and own.path else program.modules
    parts["bounds"] = assigned({name: str(list(values)) for name, values in starts.items()})
    parts["operands"] = operands  # queries, keys and values of the request in rows a:b and c:d
    parts["codes_scale"] = repr(float(call.k_scale)) if isinstance(call, DecodeCall) and call.case.holds_codes else ""
    return {**parts, "budget": _budget(found)}


def _written_call(found: Reproduced, own: OwnClass | None) -> tuple[Program, dict[str, torch.Tensor]]:
    """The call as a new instance makes it, and what the backend was handed, by the names that the program gives it."""
    case, call = found.problem.case, found.call
    out = call.output_buffer()
    tensors = named_tensors(call) | ({"out": out.view} if out else {})
    with Recorder() as recorder:
        loaded: Any = found.subject.class_of(case.role)
        if own is not None:
            loaded = Handle(loaded, recorder, own.module, f".{loaded.__name__}")
        instance = DEFINITIONS[case.role].kernel(loaded, case, found.problem.dtype, found.problem.device)
        call.prepare(instance)
        value = call.invoke(instance, out)
    return Program(recorder.steps, tensors, value if isinstance(value, tuple | list) else [value]), tensors


def _reported(found: Reproduced) -> list[str]:
    told = describe(found.subject).versions.items()
    versions = ", ".join(f"{name} {version}" for name, version in told)
    failed, device = found.record.status is Status.FAIL, describe_device(found.problem.device)
    name = found.subject.backend.name + (f", {versions}" if versions else "")
    head = f"{'A wrong' if failed else 'A right'} result of {name}."
    reported = [
        found.record.message if failed else "The suite finds no fault with it.",
        f"Looks like: {found.looks_like}" if found.looks_like else "",
        f"Called here: {found.call.name} alone, on other operands than the case's." if found.is_redrawn else "",
        f"{EXPORTED_BY} {__version__} on {device}, torch {torch.__version__}.",
        "Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.",
    ]
    # As a docstring holds them; what is copied, such as the name of an issue, stays whole.
    wrapper = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    first, *rest = (wrapper.wrap(text.replace("\\", "/").replace('"', "'")) for text in (head, *reported))
    return [*first, f"Case {found.case.id}", *(line for lines in rest for line in lines)]


def _budget(found: Reproduced) -> dict[str, str]:
    """Element rule and LSE rule of SPEC 4.2 with the numbers of this kernel, over the script's sums of a row."""
    numbers, operands = tolerance(), found.call.operands()
    declared = found.subject.declared(found.case.role).rounding_of(found.problem.dtype)
    keys, columns = max(found.call.key_lens), operands.q.shape[-1]
    dequantised = operands.dequantised
    allowed = roundoffs(found.problem.output_dtype, declared, numbers, 0, keys, columns, dequantised=dequantised)
    steps, moved = allowed.accumulation * FLOAT32_ROUNDOFF, allowed.keys + allowed.scores
    weights = allowed.p + allowed.partials + allowed.row_sum + 2 * allowed.exp
    output = {
        "a": weights + max(steps, allowed.walk * FLOAT32_ROUNDOFF) + allowed.keys + allowed.values,
        "torch.maximum(e, size[..., None] * output.abs())": steps,
        "e": moved,
        "output.abs()": allowed.output,
        "size[..., None] * output.abs()": moved,
        "peak": allowed.p_floor,
        "": allowed.output_floor,
    }
    lse = {"(size + lse.abs() + 1)": steps, "size": moved, "": allowed.row_sum + allowed.exp}
    budget = {}
    for name, factors, limit in (("output", output, numbers.element_limit), ("lse", lse, numbers.lse_limit)):
        counted = {of: f"{limit * factor:.9g}" for of, factor in factors.items() if factor}
        terms = " + ".join(f"{factor} * {of}" if of else factor for of, factor in counted.items())
        several = "\n        ".join(["(", *textwrap.wrap(terms, _MARGIN)]) + "\n    )"
        budget[name] = terms if len(terms) <= _MARGIN else several
    return budget


@dataclass(frozen=True)
class Ran:
    status: int  # exit status
    printed: str  # all that it printed

    @property
    def verdict(self) -> str:
        """WRONG or RIGHT, if it printed that and ended with the status for it; empty if it did anything else."""
        said = [line for line in self.printed.splitlines() if line in _STATUS][-1:]
        return said[0] if said and _STATUS[said[0]] == self.status else ""


def run_alone(script: Path) -> Ran:
    """Run a script as whoever receives it, for so many SECONDS: in a process to which this project is unknown."""
    command = [sys.executable, "-P", "-c", _ALONE, str(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))
