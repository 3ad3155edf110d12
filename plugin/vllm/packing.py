"""How linear weights lie in memory on the CPU: packed for the matrix kernel, yet as ordinary tensors.

vLLM's own way hides the packed weight in a handler and leaves an empty parameter, which can neither be
exported nor released. Its packed kernel for AMX machines (`weight_packed_linear`) runs on every AVX-512
machine, and there the packed weight has the shape, dtype and bytes of the plain one. So it stays the
parameter: exported, dropped and refilled like any other tensor, and faster than the handler at batch 1.

The layout is blocks of 32 rows with pairs of columns interleaved: (N/32, K/2, 32, 2). A tied embedding reads its
rows straight out of it, so that one tensor serves both ends of the model. docs/adr/0002 has the measurements.
"""

from __future__ import annotations

import torch
import vllm._custom_ops as ops
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from relight.plugin.vllm import handlers

ROWS, COLUMNS = 32, 32
"""Row and column counts must be multiples of these for the layout to be uniform."""


def probe() -> str:
    """How this CPU's weights are packed.

    `vnni32` where the packed kernel exists, computes rightly and lays rows out as above; `handlers` where oneDNN's do
    (the weight stays plain, its packed copy is rebuilt after each refill); else `plain`.
    """
    if _vnni32():
        return "vnni32"
    return "handlers" if handlers.supported() else "plain"


def _vnni32() -> bool:
    try:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
        x = torch.randn(3, 96, generator=generator).to(torch.bfloat16)
        packed = torch.ops._C.convert_weight_packed(weight)
        got = packed_linear(x, packed, None).float()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    want = x.float() @ weight.float().t()
    same_shape = packed.shape == weight.shape and packed.dtype == weight.dtype and packed.is_contiguous()
    close = bool(torch.allclose(got, want, rtol=0.02, atol=0.2))
    return same_shape and close and bool(torch.equal(packed_rows(packed, torch.arange(64)), weight))


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias for a packed `weight` (N, K) and x (..., K); bias in float32, result (..., N)."""
    result: torch.Tensor = ops.weight_packed_linear_cpu(x, weight, weight.size(0), bias)
    return result


def packed_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a packed weight (N, K), in their plain order: rows.shape + (K,)."""
    n, k = weight.shape
    blocks = weight.view(n // ROWS, k // 2, ROWS, 2)
    flat = rows.reshape(-1)
    return blocks[flat // ROWS, :, flat % ROWS, :].reshape(*rows.shape, k)


class PackedEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Looks rows up in a packed weight, for an embedding that is tied to a packed output layer."""

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return packed_rows(layer.weight, input_)


def fits(weight: torch.Tensor) -> bool:
    """Whether the packed layout is defined for this weight."""
    plain = weight.ndim == 2 and weight.dtype == torch.bfloat16
    return bool(plain and weight.shape[0] % ROWS == 0 and weight.shape[1] % COLUMNS == 0)


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Layers whose weight is used by vLLM's unquantised CPU matrix product, each weight once per layer."""
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        linear = isinstance(module, LinearBase) and isinstance(method, UnquantizedLinearMethod)
        head = isinstance(module, VocabParallelEmbedding) and isinstance(method, UnquantizedEmbeddingMethod)
        if (linear or head) and isinstance(getattr(module, "weight", None), nn.Parameter):
            found.append(module)
    return found


def keep_plain(model: nn.Module) -> None:
    """Before vLLM's post-processing: tells it not to hide linear weights in handlers (its own switch)."""
    for module in _candidates(model):
        if isinstance(module, LinearBase):
            module._cpu_skip_gemm_dispatch = True


def pack(model: nn.Module, packing: str) -> None:
    """After vLLM's post-processing: packs every fitting weight in place and points its layer at the kernel.

    Weights must hold plain values; a weight that several layers share is packed once. Any handler that vLLM made
    for the output layer is dropped.
    """
    done: set[int] = set()
    for module in _candidates(model):
        weight = module.weight
        if packing == "handlers" and weight.ndim == 2:
            module.cpu_linear = handlers.linear(weight)
            continue
        if packing != "vnni32" or not fits(weight):
            module.cpu_linear = nn.functional.linear
            continue
        if id(weight) not in done:
            done.add(id(weight))
            weight.data.copy_(torch.ops._C.convert_weight_packed(weight.data))
        bias = getattr(module, "bias", None)
        if bias is not None and bias.dtype != torch.float32:
            bias.data = bias.data.to(torch.float32)
        module.cpu_linear = packed_linear
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method = PackedEmbedding()
    handlers.rebuild()


def repack(model: nn.Module, packing: str) -> None:
    """After the parameters of a packed `model` were filled with plain values from a checkpoint: packs them again."""
    weights = {id(m.weight): m.weight for m in _candidates(model)}
    for weight in weights.values():
        if packing == "vnni32" and fits(weight):
            weight.data.copy_(torch.ops._C.convert_weight_packed(weight.data))
    handlers.rebuild()
