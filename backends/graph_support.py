"""What of a batch may run inside a CUDA graph (vLLM's ``AttentionCGSupport``)."""

from enum import Enum

import torch


class AttentionCGSupport(Enum):
    """Levels of CUDA graph support, each including the ones below it; cascade attention is never included."""

    ALWAYS = 3  # any batch, prefill and decode mixed
    UNIFORM_BATCH = 2  # batches whose requests have equally many query tokens, as in speculative decoding
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # batches of one query token a request
    NEVER = 0  # none


def may_look_at(x: torch.Tensor) -> bool:
    """Whether reading ``x`` disturbs no capture of a graph."""
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
