"""The variants against stand-ins that follow each package's documentation, and the choice between them."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.flash_attn import FlashAttnPrefillBackend
from mla_conformance.backends.platform import DeviceCapability

_VARIANTS: Mapping[str, Any] = FlashAttnPrefillBackend.variants
_PACKAGES = {
    "fa2": ("flash-attn 2.8.3", "flash_attn/flash_attn_interface.py", "flash_attn.flash_attn_interface"),
    "fa3": ("fa3-fwd 0.0.3", "fa3_fwd_interface.py", "fa3_fwd_interface"),
    "fa4": ("flash-attn-4 4.0.0b36", "flash_attn/cute/interface.py", "flash_attn.cute"),
}


def _attend(kernel: Any, variant: Any, a: Any) -> Any:
    """Natural LSE [N, T]; FA2 needs one head dim and marks a row without keys by +inf."""
    q, k, v = a["q"], a["k"], a["v"]
    assert variant in ("fa3", "fa4") or q.shape[-1] == v.shape[-1]
    assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    assert all(x.shape[-1] * x.element_size() % 16 == 0 for x in (q, k, v))
    queries, keys = a["cu_seqlens_q"], a["cu_seqlens_k"]
    assert (a["max_seqlen_q"], a["max_seqlen_k"]) == (int(queries.diff().max()), int(keys.diff().max()))
    output, lse = kernel(q, k, v, queries, keys, a["softmax_scale"], a["causal"])
    return output, lse.masked_fill(lse == -math.inf, math.inf) if variant == "fa2" else lse


def _returns(variant: Any, result: Any) -> Any:
    return (*result, None) if variant == "fa2" else result


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((name, torch.bfloat16) for name in _PACKAGES), ("fa3", torch.float8_e4m3fn)]
)
def test_conventions(variant: Any, dtype: Any, recorded: Any, installed: Any, kernel: Any, conforms: Any) -> None:
    label, file, module = _PACKAGES[variant]
    asked = {"fa4": "return_lse"}.get(variant, "return_attn_probs")

    def call(a: Any) -> Any:
        assert a[asked] is True
        return _returns(variant, _attend(kernel, variant, a))

    function = recorded(label, f"{file}:flash_attn_varlen_func", call)
    installed(module, flash_attn_varlen_func=function)
    conforms(_VARIANTS[variant], dtype=dtype)


def test_conventions_of_torchs_own(monkeypatch: Any, kernel: Any, conforms: Any) -> None:
    names = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        a = dict(zip(names, args, strict=False)) | kwargs
        assert set(a) <= set(names)
        lse_of = {
            "q": a["query"],
            "k": a["key"],
            "v": a["value"],
            "softmax_scale": a["scale"],
            "causal": a["is_causal"],
        }
        lse_of |= {"cu_seqlens_q": a["cum_seq_q"], "cu_seqlens_k": a["cum_seq_k"]}
        lse_of |= {"max_seqlen_q": a["max_q"], "max_seqlen_k": a["max_k"]}
        return (*_attend(kernel, "fa2", lse_of), None, None, None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", call)
    conforms(_VARIANTS["torch"])


@pytest.mark.parametrize(
    ("capability", "missing", "chosen"),
    [
        ((9, 0), (), "fa3"),
        ((9, 0), ("fa3",), "fa4"),
        ((9, 0), ("fa3", "fa4"), "fa2"),
        ((9, 0), ("fa3", "fa4", "fa2"), "torch"),
        ((10, 0), (), "fa4"),
        ((8, 0), (), "fa2"),
        ((8, 0), ("fa2",), "torch"),
        ((9, 0), ("fa3", "fa4", "fa2", "torch"), "fa3"),
    ],
)
def test_choice_by_device_and_what_is_installed(capability: Any, missing: Any, chosen: Any, monkeypatch: Any) -> None:
    for name, variant in _VARIANTS.items():
        reasons = ["missing"] if name in missing else []
        monkeypatch.setattr(variant, "missing_dependencies", classmethod(lambda cls, reasons=reasons: reasons))
    assert FlashAttnPrefillBackend.resolve(DeviceCapability(*capability)) is _VARIANTS[chosen]


def test_upstreams_build_of_fa3_is_used_where_the_wheel_is_missing(installed: Any, monkeypatch: Any) -> None:
    module = installed("flash_attn_interface")
    monkeypatch.setattr(_VARIANTS["fa3"], "libraries", (Library("no_such_module", "fa3-fwd", ""),))
    assert _VARIANTS["fa3"].package().load() is module


def test_the_family_itself_has_no_kernel(conforms: Any) -> None:
    with pytest.raises(NotImplementedError, match="choose one of fa2, torch, fa3, fa4"):
        conforms(FlashAttnPrefillBackend)
