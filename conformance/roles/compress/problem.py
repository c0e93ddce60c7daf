"""From a compressor's case to its calls: states and scores, both caches in pages, and what must stand in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mla_conformance.backends import compress, roles
from mla_conformance.judging.tolerance import tolerance, unit_roundoff
from mla_conformance.problems import cached_batch, memory
from mla_conformance.problems.operands import Draw, lay_out, segments, start_loc
from mla_conformance.problems.written import WrittenEntries
from mla_conformance.reference.indexer import Prepared, pooled, rms_norm, rotated, windows
from mla_conformance.reference.projections import Rotation
from mla_conformance.roles.cache.problem import CacheCall, CacheJudge, golden_bytes
from mla_conformance.roles.compress.case import CompressCase
from mla_conformance.roles.definition import RoleDefinition, filled

EPS = 1e-6
_GUARDS, _UNUSED_COLUMNS = 2, 2
_FLUSHED = 2.0**-126

Columns = Mapping[int, int]  # the page of each column of a request's table that has one


def deal_pages(case: CompressCase) -> tuple[list[dict[int, Columns]], int]:
    """Pages for states, by request and column, of each call, and how many it takes: as in an engine dealt out again."""
    free, held, count = list[int](), dict[int, dict[int, int]](), 0

    def give_back(request: int, first: int) -> None:
        own = held.setdefault(request, {})
        free.extend(own.pop(column) for column in sorted(own) if column < first)

    def needed(tokens: range) -> int:
        """The first column that groups need which are not complete before these tokens, or the group before them."""
        return max(0, tokens.start // case.ratio - case.overlap) * case.ratio // case.state_page

    tables = list[dict[int, Columns]]()
    for step in case.steps():
        for request, tokens in reversed(step.items()):  # so that the first one gets the last one's
            give_back(request, needed(tokens))
        for request, tokens in step.items():
            for column in range(needed(tokens), (tokens.stop - 1) // case.state_page + 1):
                if column not in held[request]:
                    # The one that was given back first, else a new one.
                    held[request][column] = free.pop(0) if free else count
                    count += held[request][column] == count
        tables.append({request: dict(held[request]) for request in step})
        for request, tokens in step.items():
            if tokens.stop == case.totals[request]:
                give_back(request, tokens.stop)
    return tables, count


Step = tuple[torch.Tensor, torch.Tensor, compress.CompressMetadata]
"""Key states [T, C · D] and gate scores [T, C · D] of a call, and the metadata of its batch."""


@dataclass(frozen=True, kw_only=True)
class CompressCall(CacheCall):  # ``run_compress`` for each step, in order; what all of them read is in ``named``
    steps: tuple[Step, ...]

    def owned(self) -> dict[str, torch.Tensor]:
        named = super().owned()
        for number, (kv, score, metadata) in enumerate(self.steps):
            tensors = {"kv": kv, "score": score, **vars(metadata)}
            named |= {f"{name} of call {number}": x for name, x in tensors.items()}
        return named

    def invoke(self, backend: compress.MLACompressBackend, out: memory.Guarded | None) -> None:
        self.reset()
        caches = {name: image.cache for name, image in self.written.items()}
        for kv, score, metadata in self.steps:
            backend.prepare_metadata(metadata)
            backend.run_compress(kv, score, **self.named, **caches)


def input_dtype(case: CompressCase, dtype: torch.dtype) -> torch.dtype:
    return dtype if case.inputs == "model" else torch.float32


class CompressBatch(Draw[CompressCase]):
    def __init__(self, case: CompressCase, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        self.starts = start_loc(case.totals)
        # [S, 2 · C · D] key states and scores of all tokens of each request, one request after another.
        drawn = torch.randn(self.starts[-1], 2, case.columns, generator=self.generator)
        self.projected = self.by_request(KINDS, drawn, self.starts).flatten(1).to(input_dtype(case, self.dtype))
        drawing = self.drawing(case.seed)
        ape = torch.randn(case.ratio, case.columns, generator=drawing)
        self.weights = ape, 1 + 0.5 * torch.randn(case.head_dim, generator=drawing)  # [m, C · D], and the norm's [D]
        self.table = Rotation.plain(case.rope_dim, interleaved=True).table(torch.arange(max(case.totals))).float()
        entries = tuple(total // case.ratio for total in case.totals)
        empty = memory.poison((sum(entries), case.head_dim), self.dtype, torch.device("cpu"), case.poison)
        self.entry_starts, padding = start_loc(entries), (0,) * case.pad
        self.pages = cached_batch.write_pages(self, empty, (*entries, *padding), "auto", case.page, _GUARDS)
        # Of each call the pages of states, by request and column; and the blocks [n] that they are, spare ones behind.
        self.tables, count = deal_pages(case)
        self.blocks = torch.randperm(count + case.spare, generator=self.drawing(case.seed)) + 1

    def calls(self) -> tuple[CompressCall]:
        case = self.case
        steps = tuple(map(self._step, case.steps(), self.tables))
        ape, norm_weight = self.weights
        slots = torch.cat([metadata.state_slot_mapping for *_, metadata in steps])
        like = torch.empty(0, 2 * case.columns, device=self.device)
        states = cached_batch.poisoned_pages(case, 1 + len(self.blocks), like, "auto", case.state_page, _GUARDS)
        golden = [self._golden(rows) for rows in segments(self.starts)]
        low, high = (torch.cat(bound).to(self.dtype) for bound in zip(*golden, strict=True))
        named = {"ape": ape, "norm_weight": norm_weight, "cos_sin_cache": self.table}
        entries = self.pages.cache, self.pages.slots, self.entry_starts
        written = {
            "state_cache": WrittenEntries.of("the states", states, slots[slots >= 0]),
            "kv_cache": WrittenEntries.of("the cache", *entries, low, high),
        }
        return (CompressCall.of(self, {name: x.to(self.device) for name, x in named.items()}, written, steps=steps),)

    def _golden(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        case, (ape, weight) = self.case, self.weights
        kv, score = self.projected[tokens].double().chunk(2, dim=1)
        k = windows(kv, case.ratio, case.overlap, 0.0)
        at = torch.cat(ape.double().chunk(2 if case.overlap else 1, dim=1))
        entry = pooled(k, windows(score, case.ratio, case.overlap, -torch.inf), at, torch.finfo(self.dtype).tiny)
        entry = rms_norm(entry, weight, EPS) if case.norm else entry
        # A kernel may round to the model's dtype before it rotates; of the other columns that is the last rounding.
        stored, plain = entry.rounded(entry.values), case.head_dim - case.rope_dim
        stored[:, :plain] = 0.0
        entry = Prepared(entry.values, entry.accumulated, stored, entry.least)
        entry = rotated(entry, self.table[: len(k) * case.ratio : case.ratio], plain, True)
        error = entry.error(tolerance().float32_accumulation, unit_roundoff(self.dtype)) + _FLUSHED
        return entry.values - error, entry.values + error

    def _step(self, step: Mapping[int, range], columns: Mapping[int, Columns]) -> Step:
        case, requests = self.case, list(step)
        positions = torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in step.values()])
        own = torch.cat([torch.full((len(tokens),), row) for row, tokens in enumerate(step.values())])
        rows = torch.tensor(self.starts)[requests][own] + positions
        behind = memory.poison((case.pad, 2 * case.columns), self.projected.dtype, torch.device("cpu"), case.poison)
        x = torch.cat((self.projected[rows], behind)).unsqueeze(1).to(self.device)
        kv, score = lay_out("q", x, x, case)[:, 0].chunk(2, dim=1)
        # Where a group does not need a page, what the case puts past the last.
        blocks, width = self.blocks, 1 + max(map(max, columns.values())) + _UNUSED_COLUMNS
        states = cached_batch.tails_of(case, blocks, len(columns), width)
        for row, held in enumerate(columns.values()):
            states[row, list(held)] = blocks[list(held.values())].int()
        state = states.long()[own, positions // case.state_page] * case.state_page + positions % case.state_page
        # The slot of an entry stands beside the last of its tokens.
        slots, ends = torch.cat((self.pages.slots, torch.full((1,), -1))), (positions + 1) % case.ratio == 0
        entry = torch.tensor(self.entry_starts)[requests][own] + positions // case.ratio
        metadata = compress.CompressMetadata(
            req_id_per_token=self._padded(own, 0).int(),
            positions=self._padded(positions, 0),
            query_start_loc=cached_batch.int32(start_loc([len(tokens) for tokens in step.values()]), self.device),
            seq_lens=cached_batch.int32([tokens.stop for tokens in step.values()], self.device),
            slot_mapping=self._padded(slots[entry].where(ends, -1), -1),
            block_table=self.pages.block_table[requests],
            state_slot_mapping=self._padded(state, -1),
            state_block_table=states.to(self.device),
        )
        return kv, score, metadata

    def _padded(self, x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, self.case.pad), value=value).to(self.device)


def _times(kv: float, score: float, far: float, x: torch.Tensor) -> torch.Tensor:
    """Scores far above 0 in every second column, and as far below in the others."""
    sign = 1 - 2 * (torch.arange(x.shape[-1]) % 2)
    return torch.stack((x[:, 0] * kv, x[:, 1] * score + far * sign), dim=1)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "peaked": partial(_times, 1, 20, 0.0),
    "large_scores": partial(_times, 1, 1, 200),
    "tiny_values": partial(_times, 1e-3, 1, 0.0),
    "zeros": partial(_times, 0, 0, 0.0),
}
"""Standard normal key states and scores [S, 2, C · D] float32 to those of a kind: one token of a group that outweighs
all others, exponentials beyond float32 and below it, no more variance than the norm adds, what places alone have."""


COMPRESS = RoleDefinition(
    role=roles.Role.COMPRESS,
    batch=CompressBatch,
    config=compress.MLACompressSelectorConfig,
    constructed=("compression",),
    facts=lambda case, dtype: {
        "compression": filled(compress.Compression, case, {"eps": EPS}),
        "input_dtype": input_dtype(case, dtype),
    },
    golden=golden_bytes,
    judge=CacheJudge,
)
