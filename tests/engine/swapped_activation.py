"""Swaps an operator of vLLM's for one that computes something close to it, as a library of another vendor's might."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import SiluAndMul


def _gelu(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.nn.functional.gelu(x[..., :half]) * x[..., half:]


SiluAndMul.forward = _gelu
