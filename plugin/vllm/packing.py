"""How linear weights are packed on the CPU: by vLLM itself, with its own kernels, in memory that can be shared.

A woken replica must decode as plain vLLM does: as fast, and to the same tokens. So vLLM packs as it always does, and
each layer's packed weight is found where it lies: an ordinary tensor that the layer's product closes over, or the
hidden memory of a oneDNN handler (packed_memory.py). A layer whose memory is not found keeps its plain weight, and its
handler is made anew after each refill (handlers.py). docs/adr/0002 has the choices and the measurements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import vllm._custom_ops as ops
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from relight.core.errors import LocalFault
from relight.plugin.vllm import handlers
from relight.plugin.vllm.packed_memory import Packed, Region, Watch


@dataclass(slots=True)
class Layer:
    """One layer's packed weight, in a tensor or in a region. Checkpoints are loaded into the parameter `plain`."""

    name: str
    module: nn.Module
    plain: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: torch.Tensor | None
    region: Region | None


@dataclass(slots=True)
class Packing:
    """All packed layers of one model. `how` says which ways occur; it is part of the layout fingerprint."""

    layers: list[Layer] = field(default_factory=list)
    how: str = "plain"

    def regions(self) -> dict[str, Region]:
        """Name -> hidden memory."""
        return {f"{layer.name}.packed": layer.region for layer in self.layers if layer.region is not None}

    def tensors(self) -> set[int]:
        """Identities of packed tensors: no checkpoint holds them, and repacking makes them."""
        return {id(layer.tensor) for layer in self.layers if layer.tensor is not None}

    def reload(self, load: Any) -> None:
        """Gives every layer a plain weight to load into, calls `load`, and packs what was loaded in place."""
        emptied = [layer.module.weight for layer in self.layers]
        try:
            for layer in self.layers:
                if layer.plain is not layer.module.weight:
                    layer.plain.data = torch.empty(layer.shape, dtype=layer.dtype)
                    layer.module.weight = layer.plain
            load()
            with Watch(prove=False) as watch:
                for layer in self.layers:
                    _pack(layer, watch)
        finally:
            for layer, empty in zip(self.layers, emptied, strict=True):
                if layer.plain is not empty:
                    layer.module.weight = empty
                    layer.plain.data = torch.empty(0, dtype=layer.dtype)
        handlers.rebuild()


def _pack(layer: Layer, watch: Watch) -> None:
    weight = layer.module.weight.data
    if layer.tensor is not None:
        layer.tensor.copy_(torch.ops._C.convert_weight_packed(weight))
    if layer.region is not None:
        ops.create_onednn_mm(weight.t(), handlers.PRIMITIVES)
        # Held until its bytes are copied: with the handler goes its memory.
        made = watch.made.pop()
        found = made.region
        if found is None or found.bytes != layer.region.bytes:
            raise LocalFault(f"{layer.name}: its weight, packed again, lies otherwise than before")
        ctypes.memmove(layer.region.address, found.address, found.bytes)
        del made


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers whose weight vLLM's unquantised CPU product uses."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        linear = isinstance(module, LinearBase) and isinstance(method, UnquantizedLinearMethod)
        head = isinstance(module, VocabParallelEmbedding) and isinstance(method, UnquantizedEmbeddingMethod)
        if (linear or head) and isinstance(getattr(module, "weight", None), nn.Parameter):
            yield name, module


def closed_over(function: object) -> list[object]:
    """What a layer's product closes over: a packed tensor, or a handler."""
    if not isinstance(function, FunctionType):
        return []
    return [cell.cell_contents for cell in function.__closure__ or ()]


class Adoption:
    """Around vLLM's post-processing of one model: remembers the plain parameters, then finds what became of them."""

    def __init__(self) -> None:
        self._plain: dict[str, tuple[nn.Parameter, tuple[int, ...]]] = {}
        self._watch = Watch()

    def before(self, model: nn.Module) -> None:
        """The checkpoint is loaded; vLLM packs next."""
        self._plain = {name: (m.weight, tuple(m.weight.shape)) for name, m in candidates(model)}
        self._watch.__enter__()

    def after(self, model: nn.Module) -> Packing:
        """vLLM has packed."""
        self._watch.__exit__(None, None, None)
        made = {id(p.handler): p for p in self._watch.made}
        found = Packing()
        ways: set[str] = set()
        for name, module in candidates(model):
            plain, shape = self._plain[name]
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                # Rows are looked up in the plain weight; nobody ever multiplies with it.
                module.cpu_linear = nn.functional.linear
                continue
            layer, way = self._layer(name, module, plain, shape, made)
            ways.add(way)
            if layer is not None:
                found.layers.append(layer)
        found.how = "+".join(sorted(ways)) or "plain"
        self._watch.made.clear()
        handlers.rebuild()
        return found

    @staticmethod
    def _layer(
        name: str, module: nn.Module, plain: nn.Parameter, shape: tuple[int, ...], made: dict[int, Packed]
    ) -> tuple[Layer | None, str]:
        tensor = region = None
        way = "plain"
        for held in closed_over(module.cpu_linear):
            if isinstance(held, torch.Tensor) and held.numel():
                tensor, way = held, "tensor"
            elif id(held) in made:
                region = made[id(held)].region
                way = "region" if region is not None else "rebuilt"
        if way == "rebuilt":
            # Its memory was not found: keep the plain weight, and make a handler anew after each refill.
            module.weight = plain
            module.cpu_linear = handlers.linear(plain)
        if tensor is None and region is None:
            return None, way
        if plain is not module.weight:
            plain.data = torch.empty(0, dtype=plain.dtype)
        return Layer(name, module, plain, shape, plain.dtype, tensor, region), way
