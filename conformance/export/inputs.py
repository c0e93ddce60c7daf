"""The inputs of a call as source text: drawn again by their seed, or as they are where that does not give them."""

import base64
import math
import textwrap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any

import torch

from mla_conformance.backends.slots import slots_of
from mla_conformance.cases.case import Case
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.operands import Draw, segments
from mla_conformance.reference.cache_layout import read_entries
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.prefill.problem import PrefillCall

WIDTH = 112  # characters of a line at most, unless it cannot be broken
_LAID_OUT = """
def laid_out(x, size, stride, offset):  # the same values in a memory layout
    storage = torch.full((size,), float("nan"), dtype=x.dtype, device=DEVICE)
    return storage.as_strided(x.shape, stride, offset).copy_(x)
"""
_UNPACKED = """
def unpacked(text, dtype, *shape):  # the bytes of a tensor
    data = zlib.decompress(base64.b85decode("".join(text.split())))
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
"""
HELPERS = {"laid_out(": _LAID_OUT, "unpacked(": _UNPACKED}
MOST_ELEMENTS = 2**27  # elements of a tensor that a script draws at most
MOST_BYTES = 6000  # packed bytes that fit into a script at most
_MOST_CHANGES = 4


class NotWritable(ValueError):
    """What cannot be put into a script, as one sentence."""


class TooLong(NotWritable):
    """What would fit into a script, were the case smaller."""


def named_tensors(call: AttentionCall) -> dict[str, torch.Tensor]:
    """What a backend is handed in a call, by the names that a script gives it."""
    own = ("ql_nope", "q_pe", "kv_cache", "k_scale") if isinstance(call, DecodeCall) else ("q", "k", "v")
    assert isinstance(call, DecodeCall | PrefillCall)
    found, parts = {name: getattr(call, name) for name in own}, list[Any]([call.metadata])
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif is_dataclass(value):
                parts.append(value)
    return found


def input_lines(
    case: Case, call: AttentionCall, tensors: Mapping[str, torch.Tensor], used: Iterable[str], known: Mapping[str, Any]
) -> list[str]:
    """Statements that make the named tensors that are used, by other names that are known; carried out and compared."""
    if max(tensor.numel() for tensor in tensors.values()) > MOST_ELEMENTS:
        raise TooLong("its inputs are too large for a script")
    seed = Draw(case, torch.device("cpu")).generator.initial_seed()
    drawn = [f"generator = torch.Generator().manual_seed({seed})"]
    if isinstance(call, DecodeCall):
        made, lines = {"ql_nope", "q_pe", "kv_cache", "block_table"}, _decode_operands(call, drawn)
    else:
        rows = {"k": call.key_start_loc[-1], "v": call.key_start_loc[-1], "q": call.query_start_loc[-1]}
        shapes = {name: (number, *getattr(call, name).shape[1:]) for name, number in rows.items()}
        made, lines = {*rows}, [*drawn, *(_randn(name, shape, call.q.dtype) for name, shape in shapes.items())]
        found = _carried_out(lines)
        lines += [line for name in rows for line in _amended(name, found[name], getattr(call, name))]
    lines += [line for name in tensors if name in used and name not in made for line in _plain(name, tensors[name])]
    placed = {}  # on the device, and in the memory layout, that the call had
    for name, tensor in ((name, tensors[name]) for name in tensors if name in made):
        there = "" if tensor.device.type == "cpu" else ".to(DEVICE)"
        text = f"{name}{'.contiguous()' if name in ('ql_nope', 'q_pe') else ''}{there}"
        if not tensor.is_contiguous():
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            text = f"laid_out({name}, {size}, {tensor.stride()}, {tensor.storage_offset()})"
        if text != name:
            placed[name] = text
    lines += assigned(placed)
    made_again = _carried_out(lines, **known)
    for name in used:
        # Of strides those count of dimensions of more than one element.
        layouts = (zip(x.stride(), x.shape, strict=True) for x in (made_again[name], tensors[name]))
        mine, its = ([stride for stride, size in layout if size > 1] for layout in layouts)
        if not same(made_again[name], tensors[name]) or mine != its:
            raise NotWritable(f"{name} cannot be made again from what the script would hold")
    return lines


def _decode_operands(call: DecodeCall, lines: list[str]) -> list[str]:
    latent, page = call.ql_nope.shape[-1], call.kv_cache.shape[1]
    entries, queries = _cached_entries(call).cpu(), torch.cat([call.ql_nope, call.q_pe], dim=-1).cpu()
    lines.append(_randn("latents", entries.shape, queries.dtype))
    if call.case.holds_codes:
        scale = float(call.k_scale)
        lines += [f"latents = (latents.double() / {scale!r}).clamp(-448, 448).to({entries.dtype})  # codes"]
    lines += [_randn("queries", (call.query_start_loc[-1], *queries.shape[1:]), queries.dtype)]
    drawn = _carried_out(lines)
    lines += _amended("latents", drawn["latents"], entries) + _amended("queries", drawn["queries"], queries)
    lines += _plain("block_table", call.metadata.block_table.cpu())
    fill = _first(call.kv_cache[0])  # as in all slots that no request owns; block 0 is none's
    lines += folded(f"kv_cache = torch.full({tuple(call.kv_cache.shape)}, {fill}, dtype={entries.dtype})")
    lines += [
        "for request, (start, stop) in enumerate(pairwise(KEYS)):",
        "    token = torch.arange(stop - start)",
        f"    block = block_table[request, token // {page}].long()",
        f"    kv_cache.view(torch.uint8)[block, token % {page}] = latents[start:stop].view(torch.uint8)",
        f"ql_nope, q_pe = queries[..., :{latent}], queries[..., {latent}:]",
    ]
    return lines


def _randn(name: str, shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{name} = torch.randn({', '.join(map(str, shape))}, generator=generator).to({dtype})"


def _carried_out(lines: Iterable[str], **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"torch": torch, "base64": base64, "zlib": zlib, "pairwise": pairwise, **names}
    exec("\n".join([*HELPERS.values(), *lines]), space)
    return space


def _amended(name: str, drawn: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """Statements that make of a drawn tensor the one that is wanted: rows of padding, spoiled rows, or all of it."""
    wanted, rows = wanted.cpu(), len(drawn)
    differs = (~_equal_elements(drawn, wanted[:rows])).flatten(1).any(dim=1).int()
    steps = torch.nn.functional.pad(differs, (1, 1)).diff()  # 1 where a run of rows that differ begins, -1 at its end
    runs = list(zip(*((steps == sign).nonzero()[:, 0].tolist() for sign in (1, -1)), strict=True))
    parts = [wanted[rows:], *(wanted[start:stop] for start, stop in runs)]
    if len(runs) > _MOST_CHANGES or not all(map(_is_uniform, parts)):
        return _packed(name, wanted)
    lines = [f"{name}[{start}:{stop}] = {_first(wanted[start:stop])}" for start, stop in runs]
    if len(wanted) > rows:
        shape = (len(wanted) - rows, *wanted.shape[1:])
        fill = f"torch.full({shape}, {_first(wanted[rows:])}, dtype={wanted.dtype})"
        lines += folded(f"{name} = torch.cat([{name}, {fill}])")
    return lines


def _is_uniform(x: torch.Tensor) -> bool:
    return not x.numel() or bool(_equal_elements(x, x.flatten()[:1].expand(x.numel()).view(x.shape)).all())


def _first(x: torch.Tensor) -> str:
    return literal(x.flatten()[:1].double().item())


def _packed(name: str, tensor: torch.Tensor) -> list[str]:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    text = base64.b85encode(zlib.compress(data, 9)).decode()
    if len(text) > MOST_BYTES:
        takes = f"takes {len(text)} characters, a script has room for {MOST_BYTES}"
        raise TooLong(f"{name} is not made by its seed alone and {takes}")
    rows = [text[at : at + WIDTH] for at in range(0, len(text), WIDTH)]
    return [f'{name} = unpacked("""', *rows, f'""", {", ".join([str(tensor.dtype), *map(str, tensor.shape)])})']


def _plain(name: str, tensor: torch.Tensor) -> list[str]:
    """A tensor of the metadata: as a list, as one value throughout, or its bytes."""
    where = "" if tensor.device.type == "cpu" else ", device=DEVICE"
    if tensor.numel() > 1 and _is_uniform(tensor):
        value = literal(tensor.flatten()[0].item())
        return folded(f"{name} = torch.full({tuple(tensor.shape)}, {value}, dtype={tensor.dtype}{where})")
    if (tensor.numel() <= MOST_BYTES // 8 and not tensor.is_floating_point()) or tensor.dim() == 0:
        return folded(f"{name} = torch.tensor({tensor.tolist()}, dtype={tensor.dtype}{where})")
    return [*_packed(name, tensor.cpu()), *([] if tensor.device.type == "cpu" else [f"{name} = {name}.to(DEVICE)"])]


def by_request(call: AttentionCall) -> list[tuple[torch.Tensor, ...]]:
    rows, keys = list(segments(call.query_start_loc)), list(segments(call.key_start_loc))
    if isinstance(call, DecodeCall):
        entries = _cached_entries(call)
        return [(call.ql_nope[r], call.q_pe[r], entries[k]) for r, k in zip(rows, keys, strict=True)]
    return [(call.q[r], call.k[k], call.v[k]) for r, k in zip(rows, keys, strict=True)]


def _cached_entries(call: DecodeCall) -> torch.Tensor:
    """[S, width] entries of all requests, one after the other, from the pages."""
    slots = slots_of(call.metadata, call.kv_cache.shape[1])
    return read_entries(call.kv_cache, slots[slots >= 0], call.case.cache)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; one NaN is as good as another."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(_equal_elements(a, b).all())


def _equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.cpu().double(), b.cpu().double()
    return (a == b) | (a.isnan() & b.isnan())


def literal(value: Any) -> str:
    if isinstance(value, torch.device):
        return '"cpu"' if value.type == "cpu" else "DEVICE"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, IntEnum | StrEnum):
        return literal(value.value)  # a library takes the number or the text as well
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value).replace("'", '"') if isinstance(value, str) else repr(value)
    raise NotWritable(f"the call has an argument of type {type(value).__name__}, which cannot be written down")


def folded(text: str) -> list[str]:
    """A statement in lines of WIDTH characters: broken between the arguments of its outer call, else in brackets."""
    if len(text) <= WIDTH:
        return [text]
    lines = [""]
    # Cut behind its first bracket and behind each comma that stands in one bracket alone.
    depth, start, parts = 0, 0, list[str]()
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and (character == "," or (character in "([{" and not parts)):
            parts.append(text[start : at + 1 + (character == ",")])
            start = at + 1 + (character == ",")
    for part in [*parts, text[start:]]:
        lines[-1:] = [lines[-1] + part] if len(lines[-1] + part.rstrip()) <= WIDTH else [lines[-1], f"    {part}"]
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [row for line in lines for row in wrapper.wrap(line)]


def assigned(values: Mapping[str, str]) -> list[str]:
    """Names that get the values of expressions, as many in a line as there is room for."""

    def assignment(row: Mapping[str, str]) -> str:
        return f"{', '.join(row)} = {', '.join(row.values())}"

    rows: list[dict[str, str]] = []
    for name, value in values.items():
        if not rows or len(assignment(rows[-1] | {name: value})) > WIDTH:
            rows.append({})
        rows[-1][name] = value
    return [line for row in rows for line in folded(assignment(row))]
