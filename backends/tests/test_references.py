"""References: checked by a process that has not even imported torch."""

import subprocess
import sys

CHECK = """
import sys
from mla_conformance.backends.references import known_variants, parse_reference
from mla_conformance.backends.registry import MLAPrefillBackendEnum
assert [parse_reference(each.name) for each in known_variants()] == known_variants()
assert MLAPrefillBackendEnum["FLASH_ATTN"].get_path().endswith("FlashAttnPrefillBackend")
print("torch" in sys.modules)
"""


def test_checking_references_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
