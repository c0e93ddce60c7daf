"""Golden states that were computed before: the last ones in memory, and all of them on disk where a folder is named.

On disk a state is found by a digest of the problem and of everything that its values come from, so a changed reference
or a changed regime of data never meets an old file.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from pickle import UnpicklingError

import torch

from mla_conformance.cases.case import CASE_FORMAT
from mla_conformance.problems.kept import Kept
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import AttentionState, ErrorTerms

FOLDER_VARIABLE = "MLA_CONFORMANCE_GOLDEN_CACHE"
"""Environment variable that names the folder; ``certify --golden-cache`` sets it for its workers."""
KEPT_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Memory that golden states may keep, by type of device; the last one is kept in any case."""

_SOURCES = (
    *(f"cases/{name}.py" for name in ("case", "grammar", "cached", "prefill", "decode", "layer", "hazards")),
    "judging/golden.py",
    "judging/judged_rows.py",
    "problems/*.py",
)
"""What the inputs of a problem and its judged rows come from, beside the reference."""

States = tuple[tuple[AttentionState, ...], AttentionState | None]
"""Of each call of a problem, and of all merged."""


class GoldenCache:
    """States by problem and device."""

    def __init__(self) -> None:
        self._kept = Kept[States]()

    def get(self, problem: Problem, compute: Callable[[], States]) -> States:
        """The states of a problem: from memory, from disk, or computed and kept."""
        key = (problem.key, str(problem.device))
        found = self._kept.find(key)
        if found is not None:
            return found
        states = _from_disk(problem) or _to_disk(problem, compute())
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(states))
        return self._kept.keep(key, states, size, KEPT_BYTES[problem.device.type])

    def forget(self) -> None:
        """Forget what is in memory."""
        self._kept.forget()


def _states(states: States) -> list[AttentionState]:
    calls, merged = states
    return [*calls, *([merged] if merged else [])]


def _tensors(states: States) -> Iterator[torch.Tensor]:
    for state in _states(states):
        yield from (state.output, state.lse)
        yield from _plain_terms(state).values()


def _path(problem: Problem) -> Path | None:
    """The file of a problem's states; None where no folder is named."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    parts = (CASE_FORMAT, problem.key, problem.device.type, torch.__version__, _source_digest())
    return Path(folder, hashlib.sha256(repr(parts).encode()).hexdigest()[:32] + ".pt")


@cache
def _source_digest() -> str:
    suite, reference = (Path(str(files(name))) for name in ("mla_conformance", "mla_conformance.reference"))
    paths = [path for pattern in _SOURCES for path in sorted(suite.glob(pattern))] + sorted(reference.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _from_disk(problem: Problem) -> States | None:
    """The states in a problem's file, if there is one that can be read."""
    path = _path(problem)
    if path is None or not path.exists():
        return None
    try:
        stored = torch.load(path, map_location=problem.device, weights_only=True)
        states = [AttentionState(part["output"], part["lse"], ErrorTerms(**part["terms"])) for part in stored["states"]]
    except (OSError, RuntimeError, EOFError, UnpicklingError, KeyError, TypeError):
        return None  # cut off, or not ours: it is written again
    return (tuple(states[:-1]), states[-1]) if stored["merged"] else (tuple(states), None)


def _to_disk(problem: Problem, states: States) -> States:
    """Write states whole or not at all; a disk that is full costs nothing but the time to compute them again."""
    path = _path(problem)
    if path is not None:
        stored = {"states": [_plain(state) for state in _states(states)], "merged": states[1] is not None}
        with contextlib.suppress(OSError, RuntimeError):
            _write_whole(path, stored)
    return states


def _write_whole(path: Path, stored: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder, path.name)
        torch.save(stored, written)
        written.replace(path)


def _plain(state: AttentionState) -> dict[str, object]:
    return {"output": state.output, "lse": state.lse, "terms": _plain_terms(state)}


def _plain_terms(state: AttentionState) -> dict[str, torch.Tensor]:
    return state.terms.by_name() if state.terms else {}
