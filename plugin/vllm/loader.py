"""Load format `relight`: vLLM's default loader, which also finds where vLLM's own packing puts the weights.

Its parts are used again by the disk rung, which fills the same memory in place.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from relight.plugin.vllm.packing import Adoption, Packing

LOAD_FORMAT = "relight"
PACKING = "relight_packing"
"""The model's attribute that holds its Packing."""


@register_model_loader(LOAD_FORMAT)
class RelightLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reads safetensors checkpoints only: a pickle is never opened."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))
        self._adoption = Adoption()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        self._adoption.before(model)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        setattr(model, PACKING, self._adoption.after(model))
        return model


def packing_of(model: nn.Module) -> Packing:
    """How the model that this loader loaded is packed."""
    found: Packing = getattr(model, PACKING)
    return found


def reload_in_place(model: nn.Module, vllm_config: VllmConfig, path: str) -> None:
    """Fills the weights of a loaded `model` from the checkpoint directory `path` and packs them again.

    Nothing changes its address. Raises whatever reading the checkpoint raises.
    """
    loader = RelightLoader(vllm_config.load_config)
    source = DefaultModelLoader.Source(path, revision=None, fall_back_to_pt=False)
    packing_of(model).reload(lambda: model.load_weights(loader._get_weights_iterator(source)))
