"""The golden mathematics of Multi-head Latent Attention: float64, plain PyTorch, CPU or GPU.

Every module holds one subject and imports nothing but torch and its neighbours here. Symbols, everywhere:
T query tokens, S key tokens, N query heads, P `qk_nope_head_dim`, R `qk_rope_head_dim`, V `v_head_dim`,
L `kv_lora_rank`, Lq `q_lora_rank`, H `hidden_size`, B requests, C context length of a request.

This file imports no torch, so that `dimensions` and `chunking` stay usable without it.
"""
