"""Cases of the nightly tier with contexts that no full matrix of scores fits beside. No torch."""

from functools import partial

from mla_conformance.cases.case import Call
from mla_conformance.roles.prefill.case import PrefillCase

_MILLION = 2**20

_chunked = partial(PrefillCase, capability=Call.CHUNKED_CONTEXT, heads=16, page=64, workspace=65536)

LONG_CONTEXTS = (
    PrefillCase(capability=Call.NEW_TOKENS, heads=16, q=(32768,), data="needle"),
    PrefillCase(capability=Call.NEW_TOKENS, heads=128, q=(8192,), data="needle"),
    PrefillCase(capability=Call.NEW_TOKENS, heads=16, q=(98304, 1, 32768), data="hot_tail"),
    PrefillCase(capability=Call.CONTEXT_CHUNK, heads=128, q=(256,), kv=(131072,), data="needle"),
    PrefillCase(capability=Call.CONTEXT_CHUNK, heads=16, q=(512,), kv=(_MILLION,), data="needle"),
    _chunked(q=(512,), kv=(_MILLION,), data="needle"),
    _chunked(q=(512, 3), kv=(_MILLION - 1, 100)),
)
