"""Cases as hypothesis draws them: small numbers and names, never tensors, the simplest first, so that they shrink."""

from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st

from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.cases.hazards import REGIMES
from mla_conformance.cases.prefill import PrefillCase

CONFIGURATIONS = tuple(
    (dims, dtype)
    for dims in ("small", "r1", "glm", "64-64-128-256", "128-0-128-512", "16-8-40-32")
    for dtype in ("bf16", "fp16", "fp32")
)
"""Head dims and dtypes; a backend is asked for what it declares of them."""

_EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513)
_LENGTHS = st.integers(1, 40) | st.integers(0, 600) | st.sampled_from(_EDGES)
_HEADS = st.integers(1, 20)
_SCALES = st.sampled_from((159, 100, 37, 400))
_PAGES = st.sampled_from((16, 1, 32, 64, 128))
_SHORTEST_CHUNK = 32


def profile(draws: int) -> settings:
    """The same ``draws`` cases in every run, and nothing but them: every field is given, so no setting leaks in."""
    return settings(
        max_examples=draws,
        derandomize=True,
        database=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        stateful_step_count=1,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow,),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


@st.composite
def cases(draw: st.DrawFn, capabilities: Sequence[str], configurations: Sequence[tuple[str, str]]) -> Case:
    """A case of one of ``capabilities``, with head dims and a dtype from ``configurations``."""
    capability = draw(st.sampled_from(capabilities))
    q = draw(st.lists(_LENGTHS, min_size=1, max_size=5))
    kv = draw(st.lists(_LENGTHS, min_size=len(q), max_size=len(q))) if capability != Call.NEW_TOKENS else []
    dims, dtype = draw(st.sampled_from(configurations))
    page, workspace = draw(_chunking(len(q))) if capability == Call.CHUNKED_CONTEXT else (16, 256)
    return PrefillCase(
        capability=capability,
        dtype=dtype,
        dims=dims,
        heads=draw(_HEADS),
        q=tuple(q),
        kv=tuple(kv),
        page=page,
        workspace=workspace,
        scale=draw(_SCALES),
        data=draw(st.sampled_from(list(REGIMES))),
        layout=draw(st.sampled_from(list(Layout))),
    )


@st.composite
def _chunking(draw: st.DrawFn, requests: int) -> tuple[int, int]:
    """Page, and a workspace that holds at least one page and :data:`_SHORTEST_CHUNK` tokens of every request."""
    page = draw(_PAGES)
    return page, requests * max(page, _SHORTEST_CHUNK) * draw(st.integers(1, 6))
