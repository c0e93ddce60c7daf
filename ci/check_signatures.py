"""Compare the recorded signatures with the real packages, fetched as wheels and read without importing them.

``python ci/check_signatures.py`` prints one line per recorded package and exits with 1 if a signature differs. A
package that cannot be fetched here, for want of a wheel or an index, is named with the reason and decides nothing.
"""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import Path as ZipPath

from signatures import RECORDED, signatures

_FETCH = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12")
_SECONDS = 120
_AT_ONCE = 4
_LARGE = ("lmdeploy", "sglang-kernel", "tensorrt-llm", "vllm")
"""Packages whose wheels have hundreds of megabytes; ``ci/signatures.py`` prints the signatures of an unpacked one, or
of a checkout of the commit that the label names."""


def compare(label: str, expected: dict[str, list[list[object]]]) -> tuple[str, bool]:
    """One line about the package ``NAME VERSION``, and whether a signature differs."""
    if label.split()[0] in _LARGE:
        return "not compared: its wheel is too large to fetch for this", False
    with tempfile.TemporaryDirectory() as folder:
        problem = _fetch(label.replace(" ", "=="), folder)
        if problem:
            return f"not compared: {problem}", False
        (wheel,) = Path(folder).iterdir()
        found = signatures(ZipPath(wheel), expected)
    different = sorted(name for name in expected if found.get(name) != expected[name])
    if different:
        return f"DIFFERENT: {', '.join(different)}", True
    return f"{len(expected)} signatures as recorded", False


def _fetch(requirement: str, folder: str) -> str:
    command = [sys.executable, *_FETCH, "--dest", folder, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer from the index in {_SECONDS} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or ["pip failed"])[-1] if done.returncode else ""


if __name__ == "__main__":
    with ThreadPoolExecutor(_AT_ONCE) as fetching:
        outcomes = list(fetching.map(compare, RECORDED, RECORDED.values()))
    for label, (line, _) in zip(RECORDED, outcomes, strict=True):
        sys.stdout.write(f"{label}: {line}\n")
    sys.exit(any(differs for _, differs in outcomes))
