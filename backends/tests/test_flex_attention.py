"""Flex attention runs on a CPU, so the adapter is tested on the real thing."""

from typing import Any

from mla_conformance.backends.flex_attention import FlexAttentionPrefillBackend


def test_conventions(conforms: Any) -> None:
    backend = conforms(FlexAttentionPrefillBackend, atol=2.0**-7)
    assert backend.kernel_evidence()["mode"] == "eager"
