"""The workspace that cached context of prefills is gathered into. No torch, since lists of cases ask for its limit."""

from typing import Any

MAX_WORKSPACE_TOKENS = 128 * 1024
"""However long the sequences; its up-projection is many times larger than the workspace itself."""


def workspace_tokens(config: Any) -> int:
    """Tokens of the workspace: eight longest sequences or four pages a request, and no more than 128 Ki tokens.

    It is 0 where no prefill can have context: neither are prompts split nor prefixes cached.

    Args:
        config: read are ``model_config``, ``scheduler_config`` and ``cache_config``, as in :class:`LayerConfig`.

    Raises ValueError: less than a page for each request that may be in a batch.
    """
    if not (config.scheduler_config.chunked_prefill_enabled or config.cache_config.enable_prefix_caching):
        return 0
    pages = config.scheduler_config.max_num_seqs * config.cache_config.block_size
    tokens: int = min(max(8 * config.model_config.max_model_len, 4 * pages), MAX_WORKSPACE_TOKENS)
    if tokens < pages:
        raise ValueError(
            f"expected a context workspace of at least a page for each request, {config.scheduler_config.max_num_seqs} "
            f"requests x {config.cache_config.block_size} tokens, got {tokens} tokens; lower max_num_seqs"
        )
    return tokens
