"""SGLANG_DSA: SGLang 0.5.23's sparse MLA backend for Hopper, and what derives from it, as a whole layer."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_conformance.backends import kernel, packaged, sparse_layer
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.generations.sglang import PAGE, AttentionLayer, Part, parts
from mla_conformance.backends.operands import takes

_MODULE, _CLASS = "sglang.srt.layers.attention.dsa_backend", "DeepseekSparseAttnBackend"
_TILED, _NONE, _STRANGE = "fp8_ds_mla", -1, -2
_INDEX_DIM, _INDEX_ROPE = 128, 64
_LOGITS_HEADS = (32, 64)  # index heads that DeepGEMM multiplies at once; a prefill's are padded to the fewer
_OWN_TOPK = 2048  # tokens that SGLang's compiled kernels select, no more and no fewer
_BY_TORCH = {"SGLANG_DSA_FUSE_TOPK": "0", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
_DENSE = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
_DEVIATIONS = (
    ("is a part of a model's attention module", "SGLang's ``DeepseekV2AttentionMLA`` is made around it"),
    ("reads a server's arguments and a model's description", "SGLang's defaults, eager, with the sizes of the case"),
    ("a batch decodes or prefills", "a step is a batch of those that prefill, and one for each number of new tokens"),
    ("one page table for both caches", "pages of index keys are copied to the numbers of the latents', and back"),
    ("slot 0 is no token's, and blocks follow each other", "latents are copied behind a page of their own, and back"),
    ("hidden states follow each other from a multiple of 16 bytes", "copied if not"),
    ("rows of padding belong to a graph", "they are cut off"),
    ("a selection names slots, or rows of all keys, where it is fused", "translated to positions, and back"),
    ("all heads are those of this rank", "a model of so many heads on one rank, whose output is not reduced"),
    (
        "prompts up to 2048 tokens are attended to whole, by FA3",
        "up to as many as are selected, where FA3 has the dims",
    ),
    ("the softmax scale follows from the head dims", "is set"),
)


class SGLangDSABackend(packaged.LibraryKernel, sparse_layer.MLASparseLayerBackend):
    name = "SGLANG_DSA"
    libraries = (packaged.in_extra("sglang", _MODULE),)
    devices = packaged.HOPPER
    wrapped: ClassVar[Any] = None  # the class that is driven; None for SGLang's own
    # by layout of the latent cache, what attends in a prefill and in a decode
    attends: ClassVar[Mapping[str, tuple[str, str]]] = {
        "auto": ("flashmla_sparse", "fa3"),
        _TILED: ("flashmla_kv", "flashmla_kv"),
    }
    _layer: AttentionLayer | None = None
    _made_for: tuple[torch.Size, torch.device] | None = None  # of the layer's weights, which fit no others
    by_torch: ClassVar[bool] = False  # whether PyTorch scores and selects, not DeepGEMM and SGLang's kernels
    topk: ClassVar[str] = "sgl-kernel"  # what selects, as ``--dsa-topk-backend`` has it
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", _TILED]
    supported_tile_scales = ["float32"]
    supported_block_sizes = [PAGE]
    supported_topk = [_OWN_TOPK]
    declaration = packaged.declared(
        "sglang sglang-kernel sgl-flash-mla sgl-deep-gemm torch", *_DEVIATIONS, rounding=packaged.DEQUANTISES
    )

    @classmethod
    def adapt(cls, wrapped: Any) -> type[Self]:
        own = {"__module__": wrapped.__module__, "__doc__": wrapped.__doc__, "name": wrapped.__name__}
        make: Any = type(cls)
        return make(wrapped.__name__, (cls,), {**own, "wrapped": wrapped, "variants": {}})

    @classmethod
    def _reasons(cls, config: Any) -> Iterator[str]:
        yield from super()._reasons(config)
        form, heads = config.preparation, config.num_heads
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        takes = {"flashmla_sparse": not heads % 64 or not 64 % heads, "flashmla_kv": heads <= 128}
        takes |= {"triton_sparse_mla": heads <= 32, "triton": heads <= 16 or not heads & (heads - 1)}
        for kind in dict.fromkeys(cls.attends.get(config.kv_cache_dtype, ())):
            columns = f"latents of {latent} and {rope} columns not supported by {kind}"
            if kind == "triton":
                fits = not latent % 128 and latent <= 512 and not rope & (rope - 1)
            else:
                fits, columns = (latent, rope) == (512, 64), f"{columns} (supported: 512 and 64)"
            yield from kernel.unless((fits, columns), (takes.get(kind, True), f"{heads} heads not supported by {kind}"))
        if config.skip_topk:
            return
        if (form.head_dim, rope) != (_INDEX_DIM, _INDEX_ROPE):
            yield f"index keys of {form.head_dim} columns, {rope} of them rotated, not supported"
        if not form.rope_first or form.is_neox_style or form.hadamard:
            yield "an indexer rotates neighbours in the first columns; halves are transformed by Hadamard besides"
        if form.scale_format != "float32":
            yield f"index keys with {form.scale_format} scales not supported (writes float32)"
        if config.index_n_heads % 4 if cls.by_torch else config.index_n_heads not in _LOGITS_HEADS:
            supported = "multiples of 4" if cls.by_torch else "32, 64"
            yield f"{config.index_n_heads} index heads not supported (supported: {supported})"

    def load_weights(self, weights: sparse_layer.SparseLayerWeights) -> None:
        super().load_weights(weights)
        made_for = (weights.q_a_proj.shape, weights.o_proj.device)
        if self._layer is not None and made_for == self._made_for:
            self._layer.load(self.config, weights)
            return
        wrapped, config = self.wrapped or getattr(self.library, _CLASS), self.config
        prefill, decode = self.attends[config.kv_cache_dtype]
        arguments = {"dsa_prefill_backend": prefill, "dsa_decode_backend": decode, "dsa_topk_backend": self.topk}
        whole = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        dense = config.topk_tokens if whole[0] == whole[1] or whole == (192, 128) else 0
        variables = {_DENSE: str(dense)} | (dict(_BY_TORCH) if self.by_torch else {})
        self._layer, self._made_for = AttentionLayer(wrapped, config, weights, arguments, variables), made_for

    @takes(sparse_layer.MLASparseLayerBackend.run_sparse_layer)
    def run_sparse_layer(self, x: Any) -> Tensor:
        sparse_layer.check_sparse_layer_call(self, self._metadata, x)
        attention, given = self._metadata.attention, self._metadata
        lengths, new = attention.seq_lens_cpu.tolist(), attention.query_lens_cpu.tolist()
        caches = _Caches(given, x.kv_cache, x.index_kv_cache)
        assert self._layer is not None
        self._layer.bind(caches.latents, caches.index_keys, caches.table, x.cos_sin_cache)
        slots, hidden = given.slot_mapping + PAGE, aligned(x.hidden_states).contiguous()
        output = torch.zeros_like(x.hidden_states)
        for part in parts(lengths, new, given.num_decodes):
            rows = slice(part.rows.start, part.rows.stop)
            buffer, lists = x.topk_indices_buffer[rows], None
            if self.config.skip_topk:
                lists = self._as_sglang_names(buffer, part, caches.table)
            output[rows], selected = self._layer.forward(part, hidden[rows], x.positions[rows], slots[rows], lists)
            left = selected if lists is None else lists
            if left is not None:
                buffer.copy_(self._as_positions(left, part, caches))
        caches.write_back()
        return output

    def _ragged(self, part: Part) -> bool:
        gathers = self.attends[self.config.kv_cache_dtype][0] in ("flashmla_sparse", "triton_sparse_mla")
        return self.config.kv_cache_dtype == _TILED and gathers and not part.decodes

    def _as_sglang_names(self, lists: Tensor, part: Part, table: Tensor) -> Tensor:
        """Lists [rows, K] of positions, as SGLang's fused top-k would have left them."""
        if self.by_torch:
            return lists
        if self._ragged(part):
            named = lists + _first_keys(part, lists)
        else:
            requests = torch.tensor(part.requests).repeat_interleave(torch.tensor(part.new)).to(lists.device)
            named = table[requests.unsqueeze(1), lists.long().clamp(min=0)]
        return named.int().masked_fill(lists == _NONE, _NONE)

    def _as_positions(self, selected: Tensor, part: Part, caches: "_Caches") -> Tensor:
        """The reverse; a number that names none of the request's keys becomes one that is no position."""
        if self.by_torch:
            return selected
        if self._ragged(part):
            named = selected - _first_keys(part, selected)
        else:
            named = caches.positions()[selected.long().clamp(0, len(caches.latents) - 1)]
            named = named.masked_fill((selected < 0) | (selected >= len(caches.latents)), _STRANGE)
        return named.int().masked_fill(selected == _NONE, _NONE)

    def kernel_evidence(self) -> dict[str, str]:
        prefill, decode = self.attends[self.config.kv_cache_dtype]
        served = {"prefill": prefill, "decode": decode, "topk": self.topk}
        if self._layer is not None:
            backend = type(self._layer.backend)
            served["class"] = f"{backend.__module__}.{backend.__qualname__}"
        return super().kernel_evidence() | served


_TORCH = ("its kernels select 2,048 tokens alone", "--dsa-topk-backend torch, and scores of PyTorch")
_OFF_ROCM = ("a server refuses these kernels off ROCm", "they are chosen all the same")
_PLAIN = {"by_torch": True, "topk": "torch", "supported_kv_cache_dtypes": ["auto"]}
_PLAIN["supported_topk"] = [packaged.MultipleOf(1)]
# What else a server can start with.
SGLangDSABackend.also("fa3", _TORCH, attends={"auto": ("fa3", "fa3")}, **_PLAIN)
SGLangDSABackend.also("triton_sparse_mla", _TORCH, attends={"auto": ("triton_sparse_mla", "fa3")}, **_PLAIN)
SGLangDSABackend.also("triton", _TORCH, _OFF_ROCM, attends={"auto": ("triton", "triton")}, **_PLAIN)
SGLangDSABackend.also(
    "flashmla_sparse",
    attends={_TILED: ("flashmla_sparse", "flashmla_kv")},
    supported_kv_cache_dtypes=[_TILED],
    supported_topk=[128, 256, 512, 1024, _OWN_TOPK],
)


class _Caches:
    """Both caches of a step as SGLang's pool has them: one numbering of pages, of which the first is no one's."""

    def __init__(self, metadata: Any, kv_cache: Tensor, index_kv_cache: Tensor | None) -> None:
        self._given = kv_cache, index_kv_cache
        self._blocks, page, width = kv_cache.shape
        rows = kv_cache.reshape(-1, 1, width)
        self.latents = torch.cat((rows.new_zeros(page, 1, width), rows))  # [slots, 1, width]
        attention = metadata.attention
        blocks = attention.block_table[:, : -(-attention.max_seq_len // PAGE)].long() + 1
        slots = (blocks.unsqueeze(2) * PAGE + torch.arange(PAGE, device=blocks.device)).flatten(1)
        self._columns = torch.arange(slots.shape[1], device=slots.device).expand_as(slots)
        self._known = self._columns < attention.seq_lens.unsqueeze(1)
        self.table = slots.where(self._known, 0).int()  # [B, positions]
        self.index_keys: Tensor | None = None  # [pages, bytes of a page]
        if index_kv_cache is not None:
            self._pages = self._shared_pages(metadata, len(index_kv_cache)).to(kv_cache.device)
            keys = index_kv_cache.flatten(1)
            self.index_keys = keys.new_zeros(int(self._pages.max()) + 1, keys.shape[1]).index_copy(0, self._pages, keys)

    def _shared_pages(self, metadata: Any, index_blocks: int) -> Tensor:
        """[index blocks] int64, the pool's page of each: that of the same tokens' latents, or one that is left."""
        lengths = metadata.attention.seq_lens_cpu.tolist()
        tables = (each.block_table.tolist() for each in (metadata.attention, metadata.index))
        found: dict[int, int] = {}
        for length, latent, index in zip(lengths, *tables, strict=True):
            used = -(-length // PAGE)
            found |= {block: page + 1 for block, page in zip(index[:used], latent[:used], strict=True)}
        taken = set(found.values())
        left = (page for page in range(1, self._blocks + index_blocks + 1) if page not in taken)
        return torch.tensor([found[block] if block in found else next(left) for block in range(index_blocks)])

    def positions(self) -> Tensor:
        """[slots] int64, the position of each slot in its request; of slots without a token no position."""
        found = torch.full((len(self.latents),), _STRANGE, device=self.table.device)
        return found.index_put((self.table[self._known].long(),), self._columns[self._known])

    def write_back(self) -> None:
        kv_cache, index_kv_cache = self._given
        kv_cache.copy_(self.latents[kv_cache.shape[1] :].view_as(kv_cache))
        if index_kv_cache is not None:
            assert self.index_keys is not None
            index_kv_cache.copy_(self.index_keys[self._pages].view_as(index_kv_cache))


def _first_keys(part: Part, lists: Tensor) -> Tensor:
    """[rows, 1] int64, how many keys of the batch stand before those of each row's request."""
    lengths = torch.tensor(part.lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(torch.tensor(part.new)).to(lists.device).unsqueeze(1)
