"""SGLang's layer without SGLang: which batches a step becomes, where both caches go, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends import loading, prepare, roles, sglang_dsa, sparse_layer
from mla_conformance.backends.generations.sglang import PAGE, Part, parts
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.sglang_dsa import SGLangDSABackend

FORM = prepare.IndexPreparation(128, 64, True, False, False, "float32", True, 1e-6)
_SIZES: dict[str, Any] = {"num_heads": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SIZES |= {"kv_lora_rank": 512, "index_n_heads": 64, "topk_tokens": 2048, "block_size": 64, "scale": 0.1}
_LAYOUTS: dict[str, Any] = {"kv_cache_dtype": "auto", "tile_scales": "float32", "index_kv_cache_dtype": "fp8_index"}
SERVED = sparse_layer.MLASparseLayerConfig(
    torch.bfloat16, is_neox_style=False, rms_norm_eps=1e-6, preparation=FORM, skip_topk=False, **_SIZES, **_LAYOUTS
)
TILES = SERVED._replace(kv_cache_dtype="fp8_ds_mla")


def metadata(tables: tuple[list[list[int]], list[list[int]]], lengths: list[int]) -> Any:
    latent, index = (
        SimpleNamespace(
            block_table=torch.tensor(table, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            max_seq_len=max(lengths),
        )
        for table in tables
    )
    return SimpleNamespace(attention=latent, index=index)


def test_both_caches_share_pages_and_come_back_in_batches_of_one_kind() -> None:
    huge = 2**30
    given = metadata(([[2, 0], [1, huge]], [[5, 3], [0, huge]]), [100, 3])
    latents = torch.arange(3 * PAGE * 4.0).view(3, PAGE, 4)
    keys = torch.arange(7 * PAGE * 2).to(torch.uint8).view(7, PAGE, 2)
    before = latents.clone(), keys.clone()
    caches = sglang_dsa._Caches(given, latents, keys)
    assert caches.index_keys is not None
    slots = caches.table.long()
    assert bool((slots[0, :100] > PAGE - 1).all()) and slots[1, :3].tolist() == [128, 129, 130]
    # Of each token the latent and the index key are in one slot of both.
    assert torch.equal(caches.latents[slots[0, 99]], latents[0, 35].unsqueeze(0))
    assert torch.equal(caches.index_keys[slots[0, 99] // PAGE], keys[3].flatten())
    assert caches.positions()[slots[0, :100]].tolist() == list(range(100))
    assert int(caches.positions()[0]) < 0
    caches.latents[slots[1, 2]] = -1.0
    caches.index_keys[slots[1, 2] // PAGE, 7] = 77
    caches.write_back()
    expected = before[0].index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(-1.0))
    assert torch.equal(latents, expected)
    before[1][0].view(-1)[7] = 77
    assert torch.equal(keys, before[1])
    lengths, new = [9, 5, 70, 66, 30, 12, 0, 0], [1, 1, 3, 3, 2, 12, 1, 1]
    assert parts(lengths, new, num_decodes=5) == [
        Part(True, range(2), range(2), [9, 5], [1, 1]),
        Part(True, range(2, 4), range(2, 8), [70, 66], [3, 3]),
        Part(True, range(4, 5), range(8, 10), [30], [2]),
        Part(False, range(5, 6), range(10, 22), [12], [12]),
    ]
    assert [part.drafted for part in parts(lengths, new, 5)] == [0, 3, 2, 0]

    class Theirs:
        def set_dsa_prefill_impl(self) -> None: ...

    driven = loading.as_backend(Theirs)
    assert roles.role_of(driven) is roles.Role.SPARSE_LAYER and driven is loading.as_backend(Theirs)
    assert (driven.wrapped, driven.get_name(), dict(driven.variants)) == (Theirs, "Theirs", {})


@pytest.mark.parametrize("kind", ["slots", "rows of all keys"])
def test_a_selection_is_translated_and_back(kind: str) -> None:
    given = metadata(([[2, 0], [1, 9]], [[5, 3], [0, 9]]), [100, 3])
    caches = sglang_dsa._Caches(given, torch.zeros(3, PAGE, 4), None)
    fused = SGLangDSABackend.variants["flashmla_sparse"] if kind != "slots" else SGLangDSABackend
    layer = fused(TILES, None)
    part = Part(False, range(2), range(3), [100, 3], [2, 1])
    lists = torch.tensor([[98, 0, 64, -1], [99, 3, -1, -1], [2, 0, 1, -1]], dtype=torch.int32)
    named = layer._as_sglang_names(lists, part, caches.table)
    assert not torch.equal(named, lists) and named.dtype == torch.int32
    assert torch.equal(layer._as_positions(named, part, caches), lists)
    wrong = named.masked_fill(named == named[0, 0], 10**6)
    assert int(layer._as_positions(wrong, part, caches)[0, 0]) not in range(100)


REFUSED = [
    ("", SERVED, ""),
    ("", TILES, ""),
    ("", TILES._replace(tile_scales="pow2"), "pow2 scales"),
    ("", SERVED._replace(topk_tokens=1024, index_n_heads=16), "topk 1024 | 16 index heads"),
    ("", SERVED._replace(dtype=torch.float16), "dtype"),
    ("", SERVED._replace(num_heads=5, block_size=16), "block_size 16 | 5 heads not supported by flashmla_sparse"),
    ("", SERVED._replace(preparation=FORM._replace(is_neox_style=True)), "an indexer rotates neighbours"),
    ("", SERVED._replace(preparation=FORM._replace(scale_format="pow2")), "index keys with pow2"),
    ("", SERVED._replace(preparation=FORM._replace(is_neox_style=True), skip_topk=True), ""),
    ("fa3", SERVED._replace(num_heads=5, topk_tokens=8, index_n_heads=4), ""),
    ("fa3", SERVED._replace(index_n_heads=9), "9 index heads not supported (supported: multiples of 4)"),
    ("fa3", TILES, "kv_cache_dtype fp8_ds_mla"),
    ("triton_sparse_mla", SERVED, "64 heads not supported by triton_sparse_mla"),
    ("triton", SERVED._replace(kv_lora_rank=128, qk_rope_head_dim=32, num_heads=20, skip_topk=True), "20 heads"),
    ("triton", SERVED._replace(qk_rope_head_dim=32), "index keys of 128 columns, 32 of them rotated"),
    ("flashmla_sparse", TILES._replace(topk_tokens=128), ""),
]


@pytest.mark.parametrize(("variant", "config", "said"), REFUSED)
def test_what_no_kernel_has_is_a_reason(variant: str, config: Any, said: str, monkeypatch: Any) -> None:
    kernel = SGLangDSABackend.variants[variant] if variant else SGLangDSABackend
    monkeypatch.setattr(kernel, "libraries", ())
    reasons, expected = kernel.validate_configuration(DeviceCapability(9, 0), config), said.split(" | ") if said else []
    assert len(reasons) == len(expected) and all(map(str.startswith, reasons, expected)), reasons
