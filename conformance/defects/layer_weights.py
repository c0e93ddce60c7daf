"""A layer whose decode does not use the weights that it was given."""

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


@known_defect(
    "gguf-weights-never-absorbed",
    killed_by="weight_absorption",
    sources=("vllm-project/vllm#14555", "vllm-project/vllm#13725"),
)
class DenseWeightsOnly(EagerLayer):
    """Weights of another name are never absorbed, and the first decode finds none."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            if hasattr(self.kv_b_proj, "weight"):
                super().process_weights_after_loading(act_dtype)


@known_defect(
    "prefix-kv-stale-after-weight-update",
    killed_by="weight_absorption",
    sources=("InternLM/lmdeploy#4917", "vllm-project/vllm#50079"),
)
class AbsorbedOnce(EagerLayer):
    """Absorbed weights are copies that stay as they are when the weights are replaced."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            if hasattr(self, "W_UV"):
                return
            super().process_weights_after_loading(act_dtype)
            self.W_UK_T, self.W_UV = self.W_UK_T.clone(), self.W_UV.clone()
