"""oneDNN handlers by number: hidden packed memory that can be dropped at sleep and rebuilt after a refill.

For weights that cannot be packed in place (packing.py). The weight stays the parameter, plain; a handler holds a
packed copy. Compiled code must not hold a handler itself, or it would compute with the weights of before the sleep:
so it calls one custom operator with a number, and the number is looked up at run time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import vllm._custom_ops as ops

from relight.plugin.vllm.in_place import PRIMITIVES

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_weights: list[torch.Tensor] = []
_handlers: list[object] = []


@torch.library.custom_op("relight::handler_linear", mutates_args=())  # type: ignore[untyped-decorator]
def _handler_linear(x: torch.Tensor, bias: torch.Tensor | None, number: int, rows: int) -> torch.Tensor:
    result: torch.Tensor = ops.onednn_mm(_handlers[number], x.reshape(-1, x.shape[-1]), bias)
    return result.reshape(*x.shape[:-1], rows)


@_handler_linear.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, bias: torch.Tensor | None, number: int, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def supported() -> bool:
    """Whether vLLM's build has oneDNN products here and they compute rightly."""
    if not getattr(ops, "_supports_onednn", False):
        return False
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    try:
        got = ops.onednn_mm(ops.create_onednn_mm(weight.t(), PRIMITIVES), x, None)
    except RuntimeError:
        return False
    return bool(torch.allclose(got.float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.2))


def linear(weight: torch.Tensor) -> Linear:
    """The product with `weight` (N, K), whose handler `rebuild` makes."""
    number, rows = len(_weights), weight.shape[0]
    _weights.append(weight)

    def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.relight.handler_linear(x, bias, number, rows)
        return result

    return product


def rebuild() -> None:
    """Packs every weight as it is now. Must run after each change of weights, before the next forward."""
    _handlers[:] = [ops.create_onednn_mm(weight.t(), PRIMITIVES) for weight in _weights]


def drop() -> None:
    """Gives the packed memory back; a forward before `rebuild` fails instead of computing with old weights."""
    _handlers.clear()
