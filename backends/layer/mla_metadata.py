"""What an MLA layer is told of a batch (vLLM's ``MLACommonMetadata``), and the chunks of its prefills' context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import decode, graph_support, metadata
from mla_conformance.backends.layer.attention_impl import AttentionMetadata
from mla_conformance.backends.layer.context_parallel import Sharding, local_seq_lens, local_token
from mla_conformance.reference.chunking import ContextChunk


class ContextShares(NamedTuple):
    """The shares of W ranks in the C chunks of the contexts of B prefills: of a rank its own tokens, without gaps."""

    cu_seq_lens: Tensor  # [C, B + 1] int32, on the device; which rows of this rank's part are whose
    starts: Tensor  # [C, B] int32, on the device; first of this rank's tokens of each request in the chunk
    rows: list[int]  # length of the longest part of each chunk, which all parts are sent with
    order: list[Tensor]  # of each chunk [tokens] int64, where its tokens, in order, lie among the parts of all ranks


def share_context(plan: Sequence[ContextChunk], sharding: Sharding, device: torch.device) -> ContextShares:
    """The shares in the chunks of ``plan``, which start at pages of whole sequences; a share may start anywhere."""
    lengths = torch.tensor([chunk.seq_lens for chunk in plan])
    first = lengths.cumsum(dim=0) - lengths
    ranks = [sharding._replace(rank=rank) for rank in range(sharding.world_size)]
    starts = torch.stack([local_seq_lens(first, one) for one in ranks])
    held = torch.stack([local_seq_lens(first + lengths, one) for one in ranks]) - starts
    bounds = torch.nn.functional.pad(held.cumsum(dim=-1), (1, 0))
    rows = bounds[..., -1].amax(dim=0).tolist()
    order = []
    for chunk, room in enumerate(rows):
        request = torch.arange(len(lengths[chunk])).repeat_interleave(lengths[chunk])
        skipped = first[chunk] - (lengths[chunk].cumsum(dim=0) - lengths[chunk])
        owner, local = local_token(torch.arange(len(request)) + skipped[request], sharding)
        order.append((owner * room + bounds[owner, chunk, request] + local - starts[owner, chunk, request]).to(device))
    own_bounds, own_starts = (x[sharding.rank].to(device, torch.int32) for x in (bounds, starts))
    return ContextShares(own_bounds, own_starts, rows, order)


@dataclass(kw_only=True)
class MLACommonMetadata(AttentionMetadata):
    """A batch of B requests, its prefills and its decodes each together; T tokens, requests end to end.

    ``seq_len`` counts the new tokens of a request and those computed before. A row of padding is a decode of one token
    with ``seq_len`` 0. What is no tensor here stays as it is when a graph is replayed.
    """

    num_prefills: int = 0  # requests that prefill
    num_decodes: int  # requests that decode, padding included
    num_prefill_tokens: int = 0  # new tokens of the prefills
    num_decode_tokens: int  # new tokens of the decodes; without prefills also the rows that pad a graph's batch
    prefills_first: bool = True  # whether the prefills come before the decodes or after them
    slot_mapping: Tensor  # [T] int64; -1 for a token that is not stored
    seq_lens: list[int]  # B lengths, on the host
    seq_lens_tensor: Tensor  # [B] int32
    query_start_loc: Tensor  # [B + 1] int32
    query_lens_cpu: Tensor  # [B] int32, on the host
    seq_start_loc: Tensor  # [B + 1] int32, cumulative ``seq_lens``
    context_lens_tensor: Tensor  # [B] int32
    block_tables: Tensor  # [B, max blocks] int32
    max_query_len: int = 1  # longest query of the batch, in tokens
    max_decode_query_len: int = 1  # longest query of a decode; 1 without decodes
    max_prefill_seq_len: int = 0  # longest sequence of a prefill; 0 without prefills
    max_decode_seq_len: int  # longest sequence of a decode; 0 without decodes. May exceed the true one
    dtype: torch.dtype  # of the model
    use_cuda_graph: bool = False  # whether the batch is padded to run in a captured graph
    head_dim: int | None = None  # L + R
    is_profile_run: bool = False  # whether only the memory that a batch would take is of interest
    context_plan: Sequence[ContextChunk] = ()  # the chunks of the prefills' context
    context_shares: ContextShares | None = None  # what of these chunks each rank holds; None on one rank
    context_chunk_workspace: Tensor | None = None  # [workspace tokens, L + R], bound late
    dcp_world_size: int = 1  # ranks that share the sequences' tokens
    dcp_rank: int = 0  # this rank
    cp_kv_cache_interleave_size: int = 1  # consecutive tokens that a rank keeps
    dcp_local_seq_lens: Tensor | None = None  # [B] int32, tokens on this rank; None on one rank
    dcp_local_seq_lens_cpu: Tensor | None = None  # the same on the host
    _cached_prefill_metadata: metadata.MLACommonPrefillMetadata | None = None
    _cached_decode_metadata: decode.MLACommonDecodeMetadata | None = None

    @property
    def decode_requests(self) -> slice:
        return part(self.num_decodes, self.num_prefills, not self.prefills_first)

    @property
    def prefill_tokens(self) -> slice:
        return part(self.num_prefill_tokens, self.num_decode_tokens, self.prefills_first)

    @property
    def decode_tokens(self) -> slice:
        return part(self.num_decode_tokens, self.num_prefill_tokens, not self.prefills_first)

    @property
    def prefill_metadata(self) -> metadata.MLACommonPrefillMetadata | None:
        """The prefills alone, for a prefill backend; None without any. The same object until the batch changes."""
        if self._cached_prefill_metadata is None and self.num_prefills:
            own, context = part(self.num_prefills, self.num_decodes, self.prefills_first), None
            lengths = self.query_lens_cpu[own]
            if self.context_plan:
                if self.context_chunk_workspace is None:
                    raise ValueError(
                        "prefills with context need a workspace, got none; call MLACommonState.begin_forward first"
                    )
                plan, device = self.context_plan, self.block_tables.device
                context = metadata.chunked_context_metadata(plan, self.context_chunk_workspace, device)
            self._cached_prefill_metadata = metadata.MLACommonPrefillMetadata(
                block_table=self.block_tables[own],
                query_start_loc=self._starts(own),
                max_query_len=int(lengths.max()),
                chunked_context=context,
                q_data_type=self.dtype,
                output_dtype=self.dtype,
                query_lens_cpu=lengths,
            )
        return self._cached_prefill_metadata

    @property
    def decode_metadata(self) -> decode.MLACommonDecodeMetadata | None:
        """The decodes alone, for a decode backend; None without any. The same object until the batch changes."""
        if self._cached_decode_metadata is None and self.num_decodes:
            part, local, on_host = self.decode_requests, self.dcp_local_seq_lens, self.dcp_local_seq_lens_cpu
            on_host = torch.tensor(self.seq_lens, dtype=torch.int32) if on_host is None else on_host
            self._cached_decode_metadata = decode.MLACommonDecodeMetadata(
                block_table=self.block_tables[part],
                seq_lens=(self.seq_lens_tensor if local is None else local)[part],
                query_start_loc=self._starts(part),
                max_query_len=self.max_decode_query_len,
                max_seq_len=self.max_decode_seq_len,
                query_lens_cpu=self.query_lens_cpu[part],
                seq_lens_cpu=on_host[part],
                dcp_world_size=self.dcp_world_size,
                dcp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
                dcp_tot_seq_lens=None if local is None else self.seq_lens_tensor[part],
            )
        return self._cached_decode_metadata

    def bind_workspace(self, workspace: Tensor) -> None:
        """Gather context into ``workspace`` [tokens, L + R] from now on."""
        self.context_chunk_workspace = workspace
        self._cached_prefill_metadata = None

    def advance_step(
        self,
        model_input: Any,  # its ``input_tokens`` and ``input_positions``, [num_seqs] int64, are advanced as well
        sampled_token_ids: Tensor | None,  # [num_queries] or [num_queries, 1]; None leaves ``input_tokens``
        block_size: int,  # tokens of a page
        num_seqs: int,  # requests, padding included
        num_queries: int,  # requests that count, the first ones
        turn_prefills_into_decodes: bool = False,  # whether prefills in the batch decode from now on
    ) -> None:
        """Become the next decode step's metadata, in place: every request has one new token, its sampled one."""
        requests = len(self.seq_lens)
        prefills, longest, ranks = self.num_prefills, self.max_decode_query_len, self.dcp_world_size
        for refused, reason in (
            (
                prefills and not turn_prefills_into_decodes,
                f"expected a batch of decodes, got {prefills} prefills; pass turn_prefills_into_decodes",
            ),
            (longest != 1, f"expected decodes of one token, got up to {longest}; build the next step's metadata"),
            (
                num_seqs != requests or not 0 <= num_queries <= num_seqs,
                f"expected num_seqs {requests}, the batch's requests, and at most as many queries, got {num_seqs} and "
                f"{num_queries}",
            ),
            (ranks > 1, f"cannot advance on {ranks} context-parallel ranks; build the metadata anew"),
        ):
            if refused:
                raise ValueError(reason)
        if num_queries:  # rows of padding stay as they are
            position, columns = self.seq_lens_tensor[:num_queries].long(), self.block_tables.shape[1]
            if graph_support.may_look_at(position) and int(position.max()) // block_size >= columns:
                raise ValueError(
                    f"the block table is too short: the next token of a sequence of {int(position.max())} needs "
                    f"{int(position.max()) // block_size + 1} blocks of {block_size} tokens, a row holds {columns}"
                )
            if sampled_token_ids is not None:
                model_input.input_tokens[:num_queries] = sampled_token_ids.flatten()[:num_queries]
            model_input.input_positions[:num_queries] = position
            self.seq_lens_tensor[:num_queries] += 1
            block = self.block_tables[torch.arange(num_queries, device=position.device), position // block_size].long()
            self.slot_mapping[:num_queries] = block * block_size + position % block_size
        if self.num_prefills:
            self.query_start_loc = torch.arange(requests + 1, dtype=torch.int32, device=self.query_start_loc.device)
            self.query_lens_cpu = torch.ones(requests, dtype=torch.int32)
            self.slot_mapping = self.slot_mapping[:requests]
        self.num_prefills = self.num_prefill_tokens = self.max_prefill_seq_len = 0
        self.num_decodes = self.num_decode_tokens = requests
        self.max_query_len = 1
        self.context_plan, self.context_shares = (), None
        self.seq_lens[:num_queries] = [length + 1 for length in self.seq_lens[:num_queries]]
        self.max_decode_seq_len = max(self.seq_lens)
        self.context_lens_tensor[:num_queries] = self.seq_lens_tensor[:num_queries] - 1
        self.seq_start_loc[1:] = self.seq_lens_tensor.cumsum(dim=0)
        self._cached_prefill_metadata = self._cached_decode_metadata = None

    def _starts(self, part: slice) -> Tensor:
        starts = self.query_start_loc[part.start : part.stop + 1]
        return starts - starts[0] if part.start else starts


def part(size: int, other: int, first: bool) -> slice:
    """One of two neighbouring parts."""
    return slice(0, size) if first else slice(other, other + size)
