"""Kernels that attack the run around them: what has forked, who is blamed, what the supervisor is told."""

import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Declaration, LseClass, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.engine.machine import LACKED_MEMORY

HERE = Path(__file__).parent
FIRST = not (HERE / "asked").exists()
"""Whether this is the process that is asked first what the backends are."""
(HERE / "asked").touch()


class Innocent(EagerPrefillBackend):
    """Right; while another one's thread waits for it, that ends the process."""

    waited: ClassVar[list[threading.Event]] = []

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        for event in Innocent.waited:
            event.set()
            time.sleep(60)
        return super().run_prefill_new_tokens(*arguments, **options)


class EndsOthers(EagerPrefillBackend):
    """Right; leaves a thread that ends the process in the next call of another backend."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        if not Innocent.waited:
            Innocent.waited.append(threading.Event())
            threading.Thread(target=lambda: (Innocent.waited[0].wait(), os._exit(0)), daemon=True).start()
        return super().run_prefill_new_tokens(*arguments, **options)


class Lacks(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        os._exit(LACKED_MEMORY)


class TwoFaced(EagerPrefillBackend):
    """Declares loose classes, and is loose, wherever it is not asked first what it is."""

    loose = Declaration(rounding=Rounding(lse=LseClass.ROUNDED_P, p=Precision.E4M3))
    declaration = Declaration() if FIRST else loose


class RewritesTheReport(EagerPrefillBackend):
    """Wrong; leaves a process that is nobody's child and makes a pass of every fail in the report."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        found = super().run_prefill_new_tokens(*arguments, **options)
        if not os.fork():
            if os.fork():
                os._exit(0)
            os.setsid()
            with (HERE / "left").open("a") as file:
                file.write(f"{os.getpid()}\n")
            report = HERE / "out" / "report.json"
            while True:
                if report.exists():
                    report.write_text(report.read_text().replace('"fail"', '"pass"'))
                time.sleep(0.001)
        return (found[0] * 3, found[1]) if isinstance(found, tuple) else found * 3


class DiesOfContext(EagerPrefillBackend):
    def run_prefill_context_chunk(self, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        os._exit(7)
