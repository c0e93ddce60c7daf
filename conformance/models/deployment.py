"""A model as it is deployed: the share of its heads on a rank, and the name of its cache. No torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from mla_conformance.files.inputs import InputError
from mla_conformance.models.profile import ModelProfile


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was asked about, as its plan and its report hold it.

    Attributes:
        model: the model's name, or the file that describes it.
        tp: ranks that share its heads.
        kv_cache: what its cache is called.
        heads: heads of a rank.
    """

    model: str
    tp: Annotated[int, Meta(ge=1)]
    kv_cache: str
    heads: Annotated[int, Meta(ge=1)]

    @staticmethod
    def of(profile: ModelProfile, tp: int, kv_cache: str) -> "Deployment":
        """A model on ``tp`` ranks.

        Raises:
            InputError: its heads cannot be shared so, or it has no cache of that name.
        """
        if profile.heads % tp:
            shares = ", ".join(map(str, profile.tensor_parallel_sizes))
            raise InputError(f"--tp {tp}: {profile.name} has {profile.heads} heads; expected one of {shares}")
        if kv_cache not in profile.cache_layouts:
            known = ", ".join(profile.cache_layouts)
            raise InputError(f"--kv-cache {kv_cache}: expected one of {known} for {profile.name}")
        return Deployment(model=profile.name, tp=tp, kv_cache=kv_cache, heads=profile.heads // tp)

    def __str__(self) -> str:
        return f"{self.model} at TP {self.tp}" + (f", {self.kv_cache} cache" if self.kv_cache != "auto" else "")
