"""A kernel that destroys the GPU's context: its process ends, the run goes on, and every case has one record."""

import json
import textwrap
from typing import Any

from mla_conformance.cli import main

# Without a GPU the loss is played: the library's error, and what a look at the device says from then on.
_BACKEND = """
import mla_conformance.problems.memory
from mla_conformance.backends.eager import EagerPrefillBackend


class Destroys(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if len(self._prefill_metadata.query_lens_cpu) == 1:
            mla_conformance.problems.memory.device_lost = lambda device: True
            raise RuntimeError("CUDA error: misaligned address")
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
"""


def test_the_run_goes_on_in_a_new_process(tmp_path: Any) -> None:
    backend = tmp_path / "destroys.py"
    backend.write_text(textwrap.dedent(_BACKEND))
    command = [
        "certify",
        "--backend",
        f"{backend}:Destroys",
        "--capability",
        "head_counts",
        "--capability",
        "new_tokens",
    ]
    assert main([*command, "--tier", "smoke", "--device", "cpu", "-n", "1", "--out", str(tmp_path)]) == 1
    events = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    records = [event["record"] for event in events if event["event"] == "verdict"]
    assert len({record["case"] for record in records}) == len(records) == 6
    failed = [record for record in records if record["status"] != "pass"]
    assert failed
    assert {record["status"] for record in failed} == {"fail"}
    assert all("misaligned address" in record["message"] for record in failed)
