"""Capture: a serving engine writes the metadata of its real calls as case files for ``certify --cases``.

In code, around the calls of interest::

    with capture(backend, "captured"):
        engine.step()

By the environment variable MLA_CONFORMANCE_CAPTURE, from one line where the engine has chosen its backend::

    capture_from_environment(backend)

Shapes, strides, dtypes and lengths are written before each distinct call. No tensor of the model is read; a length that
is on the device only is copied, which waits for it. A call that no case describes is passed on and warned about once.

Imports from: cases, problems, vocabulary.
"""

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mla_conformance.capture.calls import case_of_decode, case_of_prefill, observed
from mla_conformance.cases.case import Case
from mla_conformance.vocabulary.case_files import place_of, write_case

VARIABLE = "MLA_CONFORMANCE_CAPTURE"
LIMIT = 1000
_PREPARE = "prepare_metadata"
_ROLES = ((_PREPARE, "run_prefill_new_tokens", "run_prefill_context_chunk"), (_PREPARE, "run_decode"))
"""The methods of a prefill backend, and of a decode backend."""


@contextmanager
def capture(backend: Any, directory: str | Path, values: bool = False, limit: int = LIMIT) -> Iterator[None]:
    """Write the calls that go to a backend while the context lasts.

    Args:
        backend: an instance, or a class whose instances are all captured; anything with the methods of
            ``MLAPrefillBackend``, vLLM's own backends included, or of ``MLADecodeBackend``.
        directory: receives one case file per distinct call.
        values: also read the one tensor value that a case can hold, the scale of the output or of the cache.
        limit: the most distinct calls to write.

    Raises:
        TypeError: it has the methods of neither, as a whole layer.
    """
    undo = _install(backend, _Capture(Path(directory), values, limit))
    try:
        yield
    finally:
        undo()


def capture_from_environment(backend: Any) -> None:
    """Capture the calls of a backend for good, if MLA_CONFORMANCE_CAPTURE names a folder."""
    directory = os.environ.get(VARIABLE)
    if directory:
        _install(backend, _Capture(Path(directory), values=False, limit=LIMIT))


class _Capture:
    """Writes calls into a folder; whatever goes wrong is a warning, as an engine must not fail for it."""

    def __init__(self, directory: Path, values: bool, limit: int) -> None:
        self.directory, self.values, self.limit = directory, values, limit
        self._metadata: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._seen: set[str] = set()
        self._warned = False
        self._lock = threading.Lock()

    def __call__(self, backend: Any, method: str, arguments: dict[str, Any]) -> None:
        """Take one call, before it is made."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # copying a length to the host would spoil the CUDA graph
        try:
            if method == _PREPARE:
                (self._metadata[backend],) = arguments.values()
            else:
                self._write(backend, arguments, case_of_decode if method == "run_decode" else case_of_prefill)
        except Exception as error:
            if not self._warned:
                self._warned = True
                said = f"mla-conformance: a call of {method} was not captured: {type(error).__name__}: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=4)

    def _write(self, backend: Any, arguments: dict[str, Any], case_of: Callable[..., Case]) -> None:
        if len(self._seen) >= self.limit:
            return
        kept = getattr(backend, "_prefill_metadata", None) or getattr(backend, "_decode_metadata", None)
        metadata = self._metadata.get(backend) or kept
        if metadata is None:
            raise ValueError("no metadata was prepared before it")
        case = case_of(backend, metadata, arguments, self.values)
        with self._lock:
            if case.id in self._seen:
                return
            self._seen.add(case.id)
        path = place_of(case, self.directory)
        if not path.exists():  # another rank may have written it
            write_case(path, case, {"backend": type(backend).__name__, **observed(arguments)})


def _install(backend: Any, recording: _Capture) -> Callable[[], None]:
    """Put a recording wrapper before each method; the result takes them away again."""
    methods = next((methods for methods in _ROLES if all(hasattr(backend, name) for name in methods)), None)
    if methods is None:
        raise TypeError(
            f"expected a backend with {' or '.join(map(', '.join, _ROLES))}, got {backend!r}; of a layer, capture its "
            "kernels' backends"
        )
    own = {name: vars(backend)[name] for name in methods if name in vars(backend)}
    for name in methods:
        setattr(backend, name, _recorded(backend, name, recording))

    def undo() -> None:
        for name in methods:
            delattr(backend, name)
            if name in own:
                setattr(backend, name, own[name])

    return undo


def _recorded(backend: Any, name: str, recording: _Capture) -> Callable[..., Any]:
    method = getattr(backend, name)
    signature = inspect.signature(method)

    @wraps(method)
    def call(*positional: Any, **named: Any) -> Any:
        try:
            arguments = dict(signature.bind(*positional, **named).arguments)
        except TypeError:
            return method(*positional, **named)  # whose own error it is
        instance = arguments.pop(next(iter(arguments))) if isinstance(backend, type) else backend
        recording(instance, name, arguments)
        return method(*positional, **named)

    return call
