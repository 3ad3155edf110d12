"""Run by test_packing.py in the engine environment: prints what it found about packed memory, as JSON."""

from __future__ import annotations

import ctypes
import json

import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

from relight.plugin.vllm import handlers
from relight.plugin.vllm.packed_memory import Packed, Watch

SHAPES = ((960, 576), (3072, 576), (576, 1536), (4096, 512))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def products(made: list[Packed], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [ops.onednn_mm(p.handler, x, None) for p, x in zip(made, xs, strict=True)]


def hidden_memory(generator: torch.Generator) -> dict[str, object]:
    """Two sets of handlers of the same shapes: copying the memory of one under the other makes it compute the same."""
    sets = []
    for _ in range(2):
        weights = [torch.randn(n, k, generator=generator).to(torch.bfloat16) for n, k in SHAPES]
        with Watch() as watch:
            for weight in weights:
                ops.create_onednn_mm(weight.t(), 32)
        sets.append(watch.made)
    found = all(p.region is not None for made in sets for p in made)
    if not found:
        return {"found": False}
    xs = [
        torch.randn(batch, k, generator=generator).to(torch.bfloat16)
        for batch, (_, k) in zip((1, 2, 7, 33), SHAPES, strict=True)
    ]
    before = [torch.equal(a, b) for a, b in zip(products(sets[0], xs), products(sets[1], xs), strict=True)]
    for ours, theirs in zip(sets[0], sets[1], strict=True):
        if ours.region is not None and theirs.region is not None:
            ctypes.memmove(ours.region.address, theirs.region.address, theirs.region.bytes)
    after = [torch.equal(a, b) for a, b in zip(products(sets[0], xs), products(sets[1], xs), strict=True)]
    equal = [a.region.bytes == b.region.bytes for a, b in zip(*sets, strict=True) if a.region and b.region]
    return {"found": True, "same_before": any(before), "same_after": all(after), "same_sizes": all(equal)}


def rebuilt_handlers(generator: torch.Generator) -> dict[str, object]:
    """Compiled code must follow the weights: they are dropped, filled anew in place, and packed again."""
    weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
    product = handlers.linear(weight)
    handlers.rebuild()
    compiled = torch.compile(lambda x: product(x, weight, None).relu())
    x = torch.randn(4, 96, generator=generator).to(torch.bfloat16)
    before = error(compiled(x), (x.double() @ weight.double().t()).relu())
    weight.copy_(torch.randn(64, 96, generator=generator).to(torch.bfloat16))
    handlers.drop()
    try:
        compiled(x)
        refused = False
    except IndexError:
        refused = True
    handlers.rebuild()
    after = error(compiled(x), (x.double() @ weight.double().t()).relu())
    return {"before": before, "refused_while_dropped": refused, "after": after}


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    print(json.dumps({"hidden": hidden_memory(generator), "rebuilt": rebuilt_handlers(generator)}))


if __name__ == "__main__":
    main()
