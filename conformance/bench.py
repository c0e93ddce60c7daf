"""``bench``: time and memory of the golden pass against a plain reference, and what the plugin costs.

Ratios within one run, medians over repetitions; each measurement has a process of its own, so that peaks are its own.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_REPETITIONS = 5
_CASES = ((16, 512, 512), (16, 1024, 2048))
"""(heads, query tokens, key tokens), head dims of DeepSeek-R1."""


def measure() -> Iterator[str]:
    """Lines of the benchmark's table, as they are measured."""
    for heads, queries, keys in _CASES:
        golden, plain = (_golden_process(name, heads, queries, keys) for name in ("golden", "plain"))
        yield (
            f"golden pass, {heads} heads, {queries} queries, {keys} keys, causal, with error terms: "
            f"{golden['seconds'] / plain['seconds']:.2f} × the time and "
            f"{golden['megabytes'] / plain['megabytes']:.2f} × the extra memory of materialised float64 "
            f"({golden['seconds']:.3f} s, {golden['megabytes']:.0f} MB; {plain['seconds']:.3f} s, "
            f"{plain['megabytes']:.0f} MB; plain form without error terms)"
        )
    bare, loaded = (_pytest_seconds(arguments) for arguments in (["-p", "no:mla_conformance"], []))
    yield f"an unrelated pytest run: {loaded - bare:+.3f} s with the plugin ({bare:.3f} s without)"


def _golden_process(name: str, heads: int, queries: int, keys: int) -> dict[str, float]:
    command = [sys.executable, "-m", "mla_conformance.bench", name, str(heads), str(queries), str(keys)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(finished.stdout)
    return measured


def _pytest_seconds(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_nothing.py")
        test.write_text("def test_nothing():\n    pass\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), *arguments]
        return _median(lambda: subprocess.run(command, capture_output=True, check=True, cwd=folder))


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _peak_megabytes() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _measure_here(name: str, heads: int, queries: int, keys: int) -> dict[str, float]:
    import torch

    from mla_conformance.reference.attention import attention
    from mla_conformance.reference.dimensions import PRESETS

    head = PRESETS["r1"].head
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(queries, heads, head.qk_head_dim, generator=generator).bfloat16()
    k = torch.randn(keys, heads, head.qk_head_dim, generator=generator).bfloat16()
    v = torch.randn(keys, heads, head.v_head_dim, generator=generator).bfloat16()

    def golden() -> object:
        starts: dict[str, Any] = {"query_start_loc": (0, queries), "key_start_loc": (0, keys)}
        return attention(q, k, v, **starts, scale=0.1, causal=True, with_terms=True)

    def plain() -> object:
        scores = torch.einsum("tnd,snd->nts", q.double(), k.double()) * 0.1
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return torch.einsum("nts,snv->tnv", p, v.double()), scores.logsumexp(dim=-1)

    before = _peak_megabytes()
    seconds = _median({"golden": golden, "plain": plain}[name])
    return {"seconds": seconds, "megabytes": _peak_megabytes() - before}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure_here(sys.argv[1], *map(int, sys.argv[2:]))))
