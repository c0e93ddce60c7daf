"""The architectures with Multi-head Latent Attention that are known, and what of them no configuration tells.

Sources: the configuration and modelling code of transformers 5.17.0 and of vLLM 0.33.0. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Attends(StrEnum):
    """What the layers of a family attend to."""

    ALL = "all keys"
    SELECTED = "selected keys"
    COMPRESSED = "a window and compressed keys"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What models of one ``model_type`` have in common.

    Attributes:
        attends: what their layers attend to.
        sinks: whether heads have an attention sink.
        rotates: whether the R columns of queries and keys are rotated.
        shares_hidden_size: whether V is hidden_size / heads unless it is told.
        outside: what the models compute outside of the kernel, whatever their configuration says.
    """

    attends: Attends = Attends.ALL
    sinks: bool = False
    rotates: bool = True
    shares_hidden_size: bool = False
    outside: tuple[str, ...] = ()


_GATED = ("output gate",)

FAMILIES: Mapping[str, Family] = {
    "axk1": Family(),
    "axk2": Family(attends=Attends.SELECTED, outside=_GATED),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "deepseek_v32": Family(attends=Attends.SELECTED),
    "deepseek_v4": Family(
        attends=Attends.COMPRESSED, sinks=True, outside=("compressed keys", "rotation of the output back")
    ),
    "glm4_moe_lite": Family(),
    "glm5_next_text": Family(attends=Attends.SELECTED, rotates=False, outside=("pools of the indexer's tokens",)),
    "glm_moe_dsa": Family(attends=Attends.SELECTED),
    "hy_v4": Family(attends=Attends.SELECTED, sinks=True, outside=_GATED),
    "kimi_k2": Family(),
    "kimi_linear": Family(rotates=False),
    "longcat_flash": Family(outside=("rescaled latents",)),
    "minicpm3": Family(shares_hidden_size=True),
    "mistral4": Family(outside=("queries scaled by position",)),
    "youtu": Family(),
}
"""Families by ``model_type``."""
