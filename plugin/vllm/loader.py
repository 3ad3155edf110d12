"""Load format `relight`: vLLM's default loader, which leaves linear weights plain for packing.py to pack in place.

It is used twice: at start, and by the disk rung, which fills the same parameters again in place.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from relight.plugin import settings as environment
from relight.plugin.vllm.packing import Packing, keep_plain

LOAD_FORMAT = "relight"


@register_model_loader(LOAD_FORMAT)
class RelightLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reads safetensors checkpoints only: a pickle is never opened."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        # What waits for its weights gets them already processed, from a peer, or from here by the disk rung.
        if not environment.read(os.environ).awaits:
            super().load_weights(model, model_config)
        keep_plain(model)


def reload_in_place(model: nn.Module, packing: Packing, vllm_config: VllmConfig, path: str) -> None:
    """Fills the parameters of a loaded `model` from the checkpoint directory `path` and packs them again.

    The parameters keep their addresses. Raises whatever reading the checkpoint raises.
    """
    loader = RelightLoader(vllm_config.load_config)
    source = DefaultModelLoader.Source(path, revision=None, fall_back_to_pt=False)
    model.load_weights(loader._get_weights_iterator(source))
    packing.repack()
