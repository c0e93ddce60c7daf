"""The role window_decode: decode attention to the last tokens of each request, with a sink in every head.

A query token sees itself and the tokens before it, ``window`` in all. A sink is a logit without a value: it takes its
share of the weights, so that outputs shrink; the LSE stays that of the keys. docs/add-a-role.md explains each part.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import LatentKernel
from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.kernel import unless
from mla_conformance.backends.operands import Form, table
from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, dimensions
from mla_conformance.cases.case import at_least, one_of
from mla_conformance.cases.classes import Draw, Numbers, first
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Row, Space, exactly, values
from mla_conformance.problems.calls import AttentionOperands
from mla_conformance.reference.selected import RowLists
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.decode.problem import DecodeBatch, DecodeCall
from mla_conformance.roles.definition import KERNEL_SIZES, RoleDefinition

ROLE = Role("window_decode", "run_window_decode")
SINKS = ("none", "drawn", "large")


class WindowConfig(NamedTuple):
    """What a class is validated against."""

    dtype: torch.dtype
    kv_cache_dtype: str
    block_size: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    tile_scales: str
    sink: bool


class WindowDecodeBackend(LatentKernel):
    """What a kernel derives from, or has the methods of."""

    supports_sink: ClassVar[bool] = True

    @classmethod
    def _reasons(cls, config: WindowConfig) -> Iterator[str]:
        yield from cls._cache_reasons(config)
        yield from cls._latent_reasons(config)
        yield from unless((cls.supports_sink or not config.sink, "sinks not supported"))

    def prepare_metadata(self, metadata: MLACommonDecodeMetadata) -> None:
        """Take the metadata of the next calls."""
        self.metadata = metadata

    @abstractmethod
    @table
    def run_window_decode(
        self,
        ql_nope: Annotated[Tensor, Form("T or more, N, L")],
        q_pe: Annotated[Tensor, Form("T or more, N, R")],
        kv_cache: Annotated[Tensor, Form("blocks, page, width")],
        k_scale: Annotated[Tensor, Form("", torch.float32)],
        window: int,
        sink: Annotated[Tensor | None, Form("N", torch.float32)],
    ) -> tuple[Tensor, Tensor]:
        """Output [T, N, L] and LSE [N, T] float32 of the keys in the window."""


@dataclass(frozen=True, kw_only=True)
class WindowCase(DecodeCase):
    """A decode case with two fields more."""

    role: ClassVar = ROLE
    calls: ClassVar = ("window_decode",)

    window: int = at_least(1, 128, "tokens that a query sees, its own included")
    sink: str = one_of(SINKS, "none", "logits of the sinks: none, drawn, or so large that they take most of the weight")

    def contradictions(self) -> Iterator[str]:
        """Why there is no such case."""
        yield from super().contradictions()
        if self.ranks > 1:
            yield f"window_decode expects one rank, got {self.ranks}"


@dataclass(frozen=True, kw_only=True)
class WindowCall(DecodeCall):
    """A decode's call, with what it means: each query attends to the keys of its list, and to its head's sink."""

    entry = "run_window_decode"
    interface: ClassVar = WindowDecodeBackend

    def operands(self) -> AttentionOperands:
        """What the golden result is of."""
        lengths = self.key_lens
        contexts = (torch.tensor(lengths) - torch.tensor(self.query_start_loc).diff()).tolist()
        tokens = RowLists.of(None, self.window, self.query_start_loc, contexts, self.q.device)
        selected = tokens and tokens.keys([0] * len(lengths), lengths)
        return self.attended(causal=False, selected=selected, sink=self.sink)


class WindowBatch(DecodeBatch):
    """A decode's batch; its call is handed a window, and sinks."""

    def calls(self) -> tuple[WindowCall]:
        """The only call."""
        (call,), case = super().calls(), self.case
        drawn = torch.randn(case.heads, generator=self.drawing(case.seed)) + 8 * (case.sink == "large")
        sink = None if case.sink == "none" else drawn.to(self.device)
        return (WindowCall(**vars(call) | {"given": {**call.given, "window": case.window, "sink": sink}}),)


def _fields(row: Row, draw: Draw) -> Fields:
    return {"call": "window_decode", **batches.batch_fields(row, first(batches.shapes_of(row, draw)), draw)}


FEWER: dict[str, Any] = {  # of these dimensions some classes, of others all
    "heads": ("16", "128", "1", "odd"),
    "longest": ("65 to 256", "1 to 16", "17 to 64", "257 to 1,024"),
    "tile": ("between", "0 of 64", "1 of 64", "-1 of 64"),
    "page": ("64", "16", "1"),
}
BATCH = (*batches.batch("16", "1", "2", batches.MIXED), *batches.pages())
WINDOWS = Numbers({**exactly(128, 1), "short": ((5,), range(2, 128)), "long": ((512,), range(129, 4097))})
SPACE = Space(
    role=ROLE,
    capability="window_combinations",
    dimensions=(
        *dimensions.cache("auto", "fp8"),
        values("dtype", "dtype", "bf16", "fp16", "fp32"),
        *(replace(each, classes={label: {} for label in FEWER.get(each.name, each.classes)}) for each in BATCH),
        dimensions.numbers("window", "window", WINDOWS),
        values("sink", "sink", *SINKS),
        dimensions.PADDING,
        dimensions.POISONS,
        dimensions.LSE,
        values("data", "data", "needle", "normal", "negative", "ones", "large_logits"),
    ),
    rules=(batches.LONE_PADDING, *batches.BATCH_RULES, *batches.PAGE_RULES),
    shape=_fields,
    small=batches.SMALL_BATCHES,
)

WINDOW_DECODE = RoleDefinition(
    role=ROLE,
    batch=WindowBatch,
    config=WindowConfig,
    constructed=(*KERNEL_SIZES, "kv_cache_dtype"),
    facts=lambda case, dtype: {"sink": case.sink != "none"},
    space=SPACE,
    lists="""
[windows]
call=window_decode;page=64;q=[1];kv=[300];window=5                    # in the midst of a page
call=window_decode;page=64;q=[1,1,1];kv=[5,127,1000];data=ones        # longer, as long and shorter than a request
call=window_decode;page=64;q=[2,3];kv=[64,200];window=1               # the token itself

[sinks]
call=window_decode;page=64;q=[1,1];kv=[40,300];sink=drawn
call=window_decode;page=64;q=[1,1];kv=[0,300];sink=large
""",
    capabilities="""
[window_decode]
clause = "6.2"
definition = "A query attends to itself and to the tokens before it, as many as the window has."
cases = ["window_decode.windows"]

[window_sinks]
clause = "7.7"
definition = "A sink takes its share of the weights and has no part in the LSE."
cases = ["window_decode.sinks"]

[window_combinations]
clause = "6.2"
definition = "Whatever is declared is computed right together."
""",
)
