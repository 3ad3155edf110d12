"""Run by test_packing.py in the engine environment: prints what it found about both ways of packing, as JSON."""

from __future__ import annotations

import json

import torch
from vllm.platforms import current_platform

from relight.plugin.vllm import handlers, packing

SHAPES = ((32, 32), (96, 64), (576, 1536), (960, 576), (512, 128))
BATCHES = (1, 2, 7, 33)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    found: dict[str, object] = {"packing": packing.probe(), "handlers": handlers.supported()}
    worst: dict[str, float] = {"packed": 0.0, "handlers": 0.0, "plain": 0.0}
    rows_equal = same_shape = True
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=generator).to(torch.bfloat16)
        packed = torch.ops._C.convert_weight_packed(weight)
        same_shape &= packed.shape == weight.shape and packed.dtype == weight.dtype
        ids = torch.randint(0, n, (3, 5), generator=generator)
        rows_equal &= bool(torch.equal(packing.packed_rows(packed, ids), weight[ids]))
        product = handlers.linear(weight)
        handlers.rebuild()
        for batch in BATCHES:
            x = torch.randn(batch, k, generator=generator).to(torch.bfloat16)
            want = x.double() @ weight.double().t()
            worst["packed"] = max(worst["packed"], error(packing.packed_linear(x, packed, None), want))
            worst["handlers"] = max(worst["handlers"], error(product(x, weight, None), want))
            worst["plain"] = max(worst["plain"], error(torch.nn.functional.linear(x, weight), want))
    found |= {"worst": worst, "rows_equal": rows_equal, "same_shape": same_shape}

    # Compiled code must follow the weights: they are dropped, filled anew in place, and packed again.
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
    found |= {"compiled_before": before, "refused_while_dropped": refused, "compiled_after": after}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
