"""The script of one call: inputs, a class of the user's own, call, reference, budget, comparison; and running it."""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends import hub, kernel, packaged, slots
from mla_conformance.export.failing import Reproduced
from mla_conformance.export.inputs import HELPERS, NotWritable, TooLong, assigned, folded, input_lines, named_tensors
from mla_conformance.export.program import LIBRARY, Handle, Program, Recorder
from mla_conformance.files.installed import imports, is_followed, source_files
from mla_conformance.judging.record import Status
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.reference.error_budget import FLOAT32_ROUNDOFF
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.definition import DEFINITIONS
from mla_conformance.trials.facts import describe
from mla_conformance.trials.subject import Subject
from mla_conformance.version import __version__

MOST_LINES = 120  # beside those that load a kernel of the user's own, and stand in for the interface that it imports
EXPORTED_BY = "Exported by mla-conformance"  # what tells a script of ours from somebody's file
SECONDS = 600  # a library may compile for minutes at its first call
WRONG, RIGHT = "WRONG", "right"
_STATUS = {WRONG: 1, RIGHT: 0}
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
    lines = [line.rstrip() for line in environment.get_template("script.py.j2").render(**parts).splitlines()]
    counted = len(lines) - (len(parts["loads"]) if own else 0)
    if counted > MOST_LINES:
        raise TooLong(f"the script would have {counted} lines, more than {MOST_LINES}")
    return "\n".join(lines) + "\n"


def _parts(found: Reproduced, own: "OwnClass | None", path: Path) -> dict[str, Any]:
    case, call, device = found.problem.case, found.call, found.problem.device
    cls: Any = found.subject.class_of(found.case.role)
    operands = "q[a:b], k[c:d], v[c:d]"
    if isinstance(call, DecodeCall):
        operands = f"queries[a:b], key := latents[c:d, None], key[..., :{call.ql_nope.shape[-1]}]"
    out = call.output_buffer()
    tensors = named_tensors(call) | ({"out": out.view} if out else {})
    with Recorder() as recorder:  # of the call as a new instance makes it
        loaded = Handle(cls, recorder, own.module, f".{cls.__name__}") if own else cls
        instance = DEFINITIONS[case.role].kernel(loaded, case, found.problem.dtype, device)
        call.prepare(instance)
        value = call.invoke(instance, out)
    program = Program(recorder.steps, tensors, value if isinstance(value, tuple | list) else [value])
    starts = {"QUERIES": call.query_start_loc, "KEYS": call.key_start_loc}
    inputs = input_lines(case, call, tensors, program.used, {"DEVICE": str(device), **starts})
    loads = own.load_lines(path) if own else []
    if issubclass(cls, packaged.InterpretedKernel):  # set before a library is imported
        loads.insert(0, f"os.environ.update({packaged.ENVIRONMENT})".replace("'", '"'))
    text = "\n".join([*inputs, *loads, *program.lines])
    needs = dict.fromkeys(["torch", *(own.needs if own else found.subject.declared(found.case.role).distributions)])
    helpers = [helper.strip() for name, helper in HELPERS.items() if name in text]
    used = {name for use, name in _STANDARD.items() if use in "\n".join([text, *helpers])}
    parts = {"found": found, "call": call, "program": program, "inputs": inputs, "helpers": helpers, "loads": loads}
    parts |= {"text": text, "reported": _reported(found), "imports": sorted({"sys"} | used), "device": device.type}
    parts["needs"] = json.dumps(f"(needs {', '.join(needs)})", ensure_ascii=False)
    parts["modules"] = {} if own and own.path else program.modules
    parts["bounds"] = assigned({name: str(list(values)) for name, values in starts.items()})
    parts["codes_scale"] = repr(float(call.k_scale)) if isinstance(call, DecodeCall) and call.case.holds_codes else ""
    # Queries, keys and values of the request in rows a:b and c:d.
    return {**parts, "operands": operands, "budget": _budget(found)}


def _reported(found: Reproduced) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in describe(found.subject).versions.items())
    failed, device = found.record.status is Status.FAIL, kernel.describe_device(found.problem.device)
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


def run_alone(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as whoever receives it, for so many SECONDS: in a process to which this project is unknown."""
    command = [sys.executable, "-P", "-c", _ALONE, str(script)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, encoding="utf-8", errors="replace"
    )


def verdict_of(ran: subprocess.CompletedProcess[str]) -> str:
    """WRONG or RIGHT, if a script printed that and ended with the status for it; empty if it did anything else."""
    said = [line for line in ran.stdout.splitlines() if line in _STATUS][-1:]
    return said[0] if said and _STATUS[said[0]] == ran.returncode else ""


_OURS = "mla_conformance"
_INTERFACE = f"{_OURS}.backends."
_STANDS_IN = {
    "interface": "MLAPrefillBackend=Backend UnsupportedConfiguration=ValueError MLADimensions MLAPrefillSelectorConfig",
    "decode": "MLADecodeBackend=Backend MLACommonDecodeMetadata=object MLADecodeSelectorConfig=object",
    "checks": "check_decode_operands check_operands check_unquantised",
    "kernel": "UnsupportedConfiguration=ValueError expect require_declared",
    "metadata": "ChunkedContextMetadata=object MLACommonPrefillMetadata=object",
    "platform": "DeviceCapability=tuple",
    "slots": "slots_at=slots_at slots_of=slots_of",
    "block_size": "MultipleOf",
    "graph_support": "AttentionCGSupport",
    "declaration": "Declaration Deviation LseClass Precision Rounding",
}
"""What a script has in the place of names of the interface, by module; where nothing is said, what takes every call.

No declaration decides, and nothing is to be refused."""
# Modules of the roles that no script calls: whatever a file takes from them has the place of a name alone.
_UNCALLED = ["cache", "compress", "indexer", "prepare", "selected", "sparse", "sparse_layer", "topk", "tree"]
_BASE = """class Backend:  # in the place of the interface's base class: what a constructor and a caller leave behind
    supported_dtypes = [torch.float16, torch.bfloat16]
    supports_dtype = classmethod(lambda cls, dtype: dtype in cls.supported_dtypes)
    __init__ = lambda self, *, vllm_config, **sizes: vars(self).update(sizes)
    prepare_metadata = lambda self, given: vars(self).update(_prefill_metadata=given, _decode_metadata=given)

"""
_MADE = """    name = f"mla_conformance{name}"
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names, __path__=[])"""


def stand_ins(files: Iterable[Path]) -> list[str]:
    """Statements that put modules in the place of those of this project that files import, if nothing computes."""
    rooms: dict[str, None] = {}
    wanted: dict[str, str] = {}
    for path in files:
        for module, name in (each for each in imports(path) if f"{each[0]}.".startswith(f"{_OURS}.")):
            room, place = module.removeprefix(_INTERFACE), module
            expression = _stands_in(room).get(name, "")
            if room in _UNCALLED and (found := vars(import_module(module)).get(name)):
                expression = "Backend" if inspect.isabstract(found) else "MagicMock()"
            names = {name: expression}
            if not expression:  # a module is taken whole, and what stands in for all of its names with it
                place = f"{module}.{name}".rstrip(".")
                names = _stands_in(place.removeprefix(_INTERFACE))
            if not names:
                what = f"{name} of {module}" if name else module
                raise NotWritable(f"{path.name} computes with {what}, which a script cannot stand in for")
            rooms[place.removeprefix(_OURS)] = None
            wanted |= names
    if not wanted:
        return []
    lines = _BASE.splitlines()
    for function in (slots.slots_at, slots.slots_of) if wanted.keys() & _stands_in("slots").keys() else ():
        (node,) = ast.parse(inspect.getsource(function)).body  # without description and types
        assert isinstance(node, ast.FunctionDef)
        node.body, node.returns = node.body[1:], None
        for argument in node.args.args:
            argument.annotation = None
        lines += [*ast.unparse(node).splitlines(), ""]
    given = ", ".join(f"{name}={expression}" for name, expression in wanted.items())
    listed = ", ".join(f'"{room}"' for room in ("", _INTERFACE[len(_OURS) : -1], *rooms))
    return [*lines, *folded(f"names = dict({given})"), *folded(f"for name in ({listed}):"), *_MADE.splitlines()]


def _stands_in(room: str) -> dict[str, str]:
    said = (each.partition("=") for each in _STANDS_IN.get(room, "").split())
    return {name: expression or "MagicMock()" for name, _, expression in said}


@dataclass
class OwnClass:
    module: str  # its module, or the name of its file
    path: Path | None  # its file; None for a module that is installed

    def __post_init__(self) -> None:
        start = str(self.path or self.module)
        package = start.partition(".")[0]

        def is_own(name: str) -> bool:
            return name.partition(".")[0] == package or (not name.startswith(f"{_OURS}.") and is_followed(name))

        # Its file, and of what it imports, those of its package and those of no wheel.
        self.files = list(source_files([start], is_own).values())
        beside = (os.path.relpath(file, self.path.parent) for file in self.files[1:]) if self.path else ()
        self.needs = [self.module, *beside]  # by whoever runs the script

    def load_lines(self, script: Path) -> list[str]:
        """Statements that load its file, for a script that stands in a certain place; by its place, not its name."""
        lines = stand_ins(self.files)
        if self.path is None:
            return lines
        place = os.path.relpath(self.path, script.resolve().parent)
        beside = f"Path(__file__).resolve().with_name({json.dumps(self.path.name)})"
        return [
            *lines,
            f"file = Path(__file__).resolve().parent / {json.dumps(place)}",
            *([f"file = file if file.exists() else {beside}"] if place != self.path.name else []),
            "sys.path.append(str(file.parent))",
            "spec = importlib.util.spec_from_file_location(file.name, file)",
            f"{LIBRARY} = sys.modules[file.name] = importlib.util.module_from_spec(spec)",
            f"spec.loader.exec_module({LIBRARY})",
        ]


def own_class(subject: Subject, loaded: Any) -> OwnClass | None:
    """The class, if it is a library of its own; None for an adapter, of which the script shows what it calls."""
    module = loaded.__module__
    if module.startswith(f"{_OURS}.backends.generations"):
        another = "another generation of the interface, which a script does not hold"
        raise NotWritable(f"its class is driven through {another}")
    if subject.backend.reference.startswith(hub.HUB):
        raise NotWritable("its kernel is in a hub's repository, which a script does not hold")
    if issubclass(loaded, packaged.LibraryKernel) or module.startswith(f"{_OURS}."):
        return None
    path = subject.backend.file
    return OwnClass(path.name if path else module, path)
