"""Rows of docs/architecture.md's costs: ``python ci/cost.py COMMAND ...`` runs each command and says what it took.

A command is one argument, as a person types it: ``python ci/cost.py 'mla-conformance certify --backend TORCH_SDPA'``.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch


def _machine(command: str) -> str:
    """What the command runs on: GPUs, unless it asks for none or there is none."""
    count = torch.cuda.device_count()
    if count and "--device cpu" not in command:
        return f"{count} {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), flags=re.MULTILINE)
    return f"{os.cpu_count()} cores of {processor[1] if processor else 'a CPU'}, torch {torch.__version__}"


def _cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(commands: list[str]) -> None:
    for command in commands:
        begun, before = time.monotonic(), _cpu_seconds()
        status = subprocess.run(shlex.split(command), stdout=sys.stderr).returncode
        seconds, cpu = time.monotonic() - begun, _cpu_seconds() - before
        if status not in (0, 1):  # a verdict either way
            sys.exit(f"{command}: ended with {status} before it was measured")
        sys.stdout.write(f"| `{command}` | {_machine(command)} | {seconds:.0f} | {cpu:.0f} |\n")


if __name__ == "__main__":
    main(sys.argv[1:])
