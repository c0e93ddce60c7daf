"""The script: inputs, call, reference, budget and comparison of one call, in at most 120 lines."""

import ast
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends.interpreted import ENVIRONMENT, InterpretedKernel
from mla_conformance.backends.platform import describe_device
from mla_conformance.driving.kernel_support import decode_kernel, prefill_kernel
from mla_conformance.driving.plain import parts_of
from mla_conformance.export.failing import Reproduced
from mla_conformance.export.inputs import LAID_OUT, UNPACKED, input_lines, named_tensors, require_equal
from mla_conformance.export.literals import NotWritable, folded
from mla_conformance.export.own import OwnClass, own_class
from mla_conformance.export.program import Program, written
from mla_conformance.export.recording import Handle, Recorder
from mla_conformance.judging.rounding import roundoffs
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.decode_call import DecodeCall
from mla_conformance.reference.error_budget import FLOAT32_ROUNDOFF
from mla_conformance.version import __version__

MOST_LINES = 120


@dataclass(frozen=True)
class _Recorded:
    """What a backend did in the call, and the tensors that the call was made of."""

    program: Program
    tensors: Mapping[str, torch.Tensor]


def script_of(found: Reproduced, path: Path) -> str:
    """The text of the script that stands at ``path``.

    Raises:
        NotWritable: something of it cannot be written down, or not in so many lines.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("mla_conformance.export", ".")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    own = own_class(found.subject, found.subject.class_of(found.problem.case.role))
    text = environment.get_template("script.py.j2").render(**_parts(found, own, path))
    lines = [line.rstrip() for line in text.splitlines()]
    if len(lines) > MOST_LINES:
        raise NotWritable(
            f"the script would have {len(lines)} lines, more than {MOST_LINES}; export a smaller case "
            "(mla-conformance minimize makes one)"
        )
    ast.parse(text)
    return "\n".join(lines) + "\n"


def _parts(found: Reproduced, own: OwnClass | None, path: Path) -> dict[str, Any]:
    case, call, recorded = found.problem.case, found.call, _recorded(found, own)
    program = recorded.program
    bounds = [line for name, locations in _bounds(found) for line in folded(f"{name} = {list(locations)}")]
    inputs = input_lines(case, call, recorded.tensors, program.used)
    locations = dict(_bounds(found))
    require_equal(inputs, recorded.tensors, program.used, DEVICE=str(found.problem.device), **locations)
    loads = own.load_lines(path) if own else []
    text = "\n".join([*inputs, *loads, *program.lines])
    interpreted = issubclass(found.subject.class_of(case.role), InterpretedKernel)
    environment = str(ENVIRONMENT).replace("'", '"') if interpreted else ""
    standard = {"base64": "base64.", "zlib": "zlib."} if "unpacked(" in text else {}
    return {
        **_told(found, own),
        "imports": sorted(["sys", *standard, *(["os"] if environment else [])]),
        "environment": environment,
        "types": ["SimpleNamespace"] if "SimpleNamespace(" in text else [],
        "paths": "Path(" in text,
        "needs": ", ".join(["torch", *_distributions(found, own)]),
        "library_imports": [*loads, *map(_import, program.modules.items())],
        "device_type": found.problem.device.type,
        "scale": repr(case.softmax_scale),
        "causal": call.question().causal,
        "bounds": bounds,
        "excused": list(found.excused),
        "laid_out": LAID_OUT.strip() if "laid_out(" in text else "",
        "unpacked": UNPACKED.strip() if "unpacked(" in text else "",
        "budget": _budget(found),
        "inputs": inputs,
        "call": program.lines,
        "operands": _operands(found),
        "judges_lse": call.judges_lse,
        "output": program.results[0],
        "lse": program.results[-1],
    }


def _told(found: Reproduced, own: OwnClass | None) -> dict[str, str]:
    """What the first lines say."""
    wrong = found.verdict.status is Status.FAIL
    name = found.subject.name
    return {
        "title": f"{'Reproduces a wrong result' if wrong else 'Checks a right result'} of {name}.",
        "library": ", ".join(f"{each} {version}" for each, version in found.subject.versions().items()) or name,
        "case": found.problem.case.id,
        "verdict": (found.verdict.message if wrong else "The suite finds no fault with it.").replace("\\", "/"),
        "version": __version__,
        "device": describe_device(found.problem.device),
        "torch": str(torch.__version__),
    }


def _distributions(found: Reproduced, own: OwnClass | None) -> Sequence[str]:
    if own is not None:
        return [own.path.name if own.path else own.module]
    return [name for name in found.subject.declaration_of(found.problem.case.role).distributions if name != "torch"]


def _bounds(found: Reproduced) -> list[tuple[str, tuple[int, ...]]]:
    return [("QUERIES", found.call.query_start_loc), ("KEYS", found.call.key_start_loc)]


def _import(module: tuple[str, str]) -> str:
    short, full = module
    return f"import {full}" if short == full else f"import {full} as {short}"


def _operands(found: Reproduced) -> str:
    """Queries, keys and values of the request in rows a:b and c:d."""
    call = found.call
    if not isinstance(call, DecodeCall):
        return "q[a:b], k[c:d], v[c:d]"
    scale = f" * {float(call.k_scale)!r}" if call.holds_codes else ""
    keys = f"latents[c:d, None].to(DEVICE).double(){scale}"
    return f"queries[a:b].to(DEVICE), key := {keys}, key[..., :{call.ql_nope.shape[-1]}]"


def _recorded(found: Reproduced, own: OwnClass | None) -> _Recorded:
    """Make the call on a new instance, and write down what was seen."""
    case, call = found.problem.case, found.call
    create = decode_kernel if isinstance(call, DecodeCall) else prefill_kernel
    out = call.output_buffer()
    tensors = named_tensors(call) | ({"out": out.view} if out else {})
    with Recorder() as recorder:
        loaded: Any = found.subject.class_of(case.role)
        if own is not None:
            loaded = Handle(loaded, recorder, own.module, f".{loaded.__name__}")
        instance: Any = create(loaded, case)
        call.prepare(instance)
        value = call.invoke(instance, out)
    results = [part for part in parts_of(value)]
    return _Recorded(written(recorder.steps, tensors, list(value) if len(results) > 1 else [value]), tensors)


def _budget(found: Reproduced) -> dict[str, Any]:
    """Element rule and LSE rule of SPEC 4.2, with the numbers of this kernel."""
    case, call, numbers = found.problem.case, found.call, tolerance()
    declared = found.subject.declaration_of(case.role).rounding_of(found.problem.dtype)
    dequantised = call.question().dequantised
    u = roundoffs(found.problem.output_dtype, declared, numbers, None, max(call.key_lens), dequantised)
    steps = u.accumulation * FLOAT32_ROUNDOFF
    terms = {
        "a": u.p + u.partials + u.row_sum + 2 * u.exp + steps + u.keys + u.values,
        "e": steps + u.keys + u.scores,
        "output.abs()": u.output,
        "size[..., None] * output.abs()": u.keys + u.scores,
        "peak": u.p_floor,
    }
    written_terms = [f"{factor:.9g} * {name}" for name, factor in terms.items() if factor]
    of_lse = [f"{steps:.9g} * (size + lse.abs() + 1)"]
    of_lse += [f"{u.keys + u.scores:.9g} * size"] if u.keys + u.scores else []
    of_lse += [f"{u.row_sum + u.exp:.9g}"] if u.row_sum + u.exp else []
    output = textwrap.wrap(" + ".join([*written_terms, f"{u.output_floor:.9g}"]), 96)
    return {"m": u.p_floor, "output": f"\n{' ' * 14}".join(output), "lse": " + ".join(of_lse)}
