"""The golden mathematics of Multi-head Latent Attention: float64, plain PyTorch, CPU or GPU.

Symbols: T query tokens, S key tokens, N query heads, P `qk_nope_head_dim`, R `qk_rope_head_dim`, V `v_head_dim`,
L `kv_lora_rank`, Lq `q_lora_rank`, H `hidden_size`, B requests, C context length of a request.
"""
