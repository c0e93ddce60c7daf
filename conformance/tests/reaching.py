"""Backends that reach for what judges them; apart, there is nothing of it in their process."""

import gc
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.judging.verdict import Status, Verdict
from mla_conformance.roles.table import judge


def _passes(*_: Any, **__: Any) -> Any:
    from mla_conformance.judging.verdict import Status, Verdict

    return Verdict(Status.PASS)


class RewritesTheJudge(EagerPrefillBackend):
    """Three times what is right, and a judge whose code says that it passes: it is still the same function."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        judge.__code__ = _passes.__code__
        assert judge(None, None, None, None) == Verdict(Status.PASS)  # type: ignore[arg-type]
        output, lse = super().run_prefill_new_tokens(*arguments, **options)
        return output.mul_(3), lse


class LooksForTheRightResult(EagerPrefillBackend):
    """Raises if there is one."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        found = [each for each in gc.get_objects() if type(each) is GoldenAttention]
        assert not found, "what is expected is in this process"
        return super().run_prefill_new_tokens(*arguments, **options)


class Forges(EagerPrefillBackend):
    """Answers in place of the process that calls it."""

    answer = b'{"number": 1, "error": "", "verdict": "pass"}'

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            try:
                connection = socket.socket(fileno=os.dup(number))
            except OSError:  # no socket, or the folder's own
                continue
            connection.sendall(struct.pack("<Q", len(self.answer)) + self.answer)
        return super().run_prefill_new_tokens(*arguments, **options)


class Signals(EagerPrefillBackend):
    """Sends the judge a signal that does nothing; whoever may do that may stop or end it as well."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        os.kill(os.getppid(), signal.SIGCONT)
        return super().run_prefill_new_tokens(*arguments, **options)
