"""How linear weights lie in memory on the CPU: packed for the matrix kernels, yet as ordinary tensors.

A woken replica must decode as plain vLLM does: as fast, and to the same tokens. So each layer computes with the
kernel that vLLM itself would choose, and its packed weight is the parameter: exported, dropped and refilled like any
other tensor. Small weights use vLLM's own packed kernel; large ones a oneDNN handler that was made inside the
parameter (in_place.py). A layer for which neither works keeps a plain weight, and a handler that is made anew after
each refill (handlers.py).

The packed layout is blocks of rows with pairs of columns interleaved: (N/rows, K/2, rows, 2), the same number of bytes
as the plain one. `rows` depends on CPU and kernel, is found by looking, and is part of the layout fingerprint. A tied
embedding reads its rows straight out of the packed weight. docs/adr/0002 has the choices and the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm._custom_ops as ops
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from relight.core.errors import LocalFault
from relight.plugin.vllm import handlers
from relight.plugin.vllm.in_place import InPlace, NotTaken

ROWS = (16, 32, 48, 64)
"""Rows in a block that kernels are known to use."""


def pack_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A plain weight (N, K) in blocks of `rows`: a new tensor of the same shape and dtype, bytes in packed order."""
    n, k = weight.shape
    return weight.view(n // rows, rows, k // 2, 2).permute(0, 2, 1, 3).contiguous().view(n, k)


def packed_rows(weight: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of a weight (N, K) that is packed in blocks of `rows`, in their plain order: ids.shape + (K,)."""
    n, k = weight.shape
    blocks = weight.view(n // rows, k // 2, rows, 2)
    flat = ids.reshape(-1)
    return blocks[flat // rows, :, flat % rows, :].reshape(*ids.shape, k)


@torch.library.custom_op("relight::packed_rows", mutates_args=())  # type: ignore[untyped-decorator]
def _table(weight: torch.Tensor, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A small plain embedding (len(ids), K) of the rows asked for, and the ids 0, 1, ... that look them up in order."""
    flat = ids.reshape(-1)
    order = torch.arange(len(flat), dtype=ids.dtype).reshape(ids.shape)
    return packed_rows(weight, flat, rows), order


@_table.register_fake  # type: ignore[untyped-decorator]
def _(weight: torch.Tensor, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.new_empty((ids.numel(), weight.shape[1])), torch.empty_like(ids)


def rows_of(packed: torch.Tensor, plain: torch.Tensor) -> int | None:
    """In which blocks `packed` holds `plain`; None when in none of them."""
    n, k = plain.shape
    for rows in ROWS:
        if n % rows or k % 2:
            continue
        # Most ways that are wrong show in the first blocks already.
        if torch.equal(packed[:rows], pack_rows(plain[:rows], rows)) and torch.equal(packed, pack_rows(plain, rows)):
            return rows
    return None


class PackedEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Looks rows up in a packed weight, for an embedding that is tied to a packed output layer."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        # Where the compiler rounds to bf16 follows from the shape of the graph, and decides ties between tokens: it has
        # to see the very embedding that it sees in plain vLLM.
        table, order = torch.ops.relight.packed_rows(layer.weight, input_, self._rows)
        return nn.functional.embedding(order, table)


@dataclass(slots=True)
class Packing:
    """What became of a model's weights: the packed ones with their blocks, and how many have handlers apart."""

    packed: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    apart: int = 0

    @property
    def name(self) -> str:
        """For the layout fingerprint: two models with the same name hold the same bytes for the same weights."""
        return "+".join(f"vnni{rows}" for rows in sorted({rows for _, rows in self.packed})) or "plain"

    def repack(self) -> None:
        """After the parameters were filled with plain values from a checkpoint: packs them as they were."""
        for weight, rows in self.packed:
            weight.data.copy_(pack_rows(weight.data, rows))
        handlers.rebuild()


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Layers whose weight is used by vLLM's unquantised CPU matrix product."""
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        linear = isinstance(module, LinearBase) and isinstance(method, UnquantizedLinearMethod)
        head = isinstance(module, VocabParallelEmbedding) and isinstance(method, UnquantizedEmbeddingMethod)
        weight = getattr(module, "weight", None)
        if (linear or head) and isinstance(weight, nn.Parameter) and weight.ndim == 2:
            found.append(module)
    return found


def _by_packed_kernel(weight: torch.Tensor) -> bool:
    """Whether vLLM would multiply with this weight by its own packed kernel, not by oneDNN."""
    return bool(check_cpu_sgl_kernel(*weight.shape, weight.dtype))


def keep_plain(model: nn.Module) -> None:
    """Before vLLM's post-processing: tells it not to hide linear weights in handlers (its own switch)."""
    for module in _candidates(model):
        if isinstance(module, LinearBase):
            module._cpu_skip_gemm_dispatch = True
            bias = getattr(module, "bias", None)
            if bias is not None and _by_packed_kernel(module.weight):
                bias.data = bias.data.to(torch.float32)


def pack(model: nn.Module, *, filled: bool = True) -> Packing:
    """Packs every weight where it lies and points its layer at the kernel. Weights hold plain values, or zeros if the
    model is not `filled` yet.

    A weight that several layers share is packed once. Any handler that vLLM made for the output layer is dropped.
    """
    found = Packing()
    packer = _Packer(filled)
    made: dict[int, tuple[Callable[..., torch.Tensor], int | None]] = {}
    for module in _candidates(model):
        weight = module.weight
        if id(weight) not in made:
            product, rows = packer.pack(weight.data)
            if rows is not None:
                found.packed.append((weight, rows))
            else:
                found.apart += 1
            made[id(weight)] = product, rows
        module.cpu_linear, rows = made[id(weight)]
        if isinstance(module, VocabParallelEmbedding) and rows is not None:
            module.quant_method = PackedEmbedding(rows)
    handlers.rebuild()
    return found


def _tell_apart(weight: torch.Tensor) -> None:
    """Fills `weight` so that it shows how it is packed: zeros look alike in any order."""
    # Small whole numbers are exact in every dtype that is packed, and a prime period fits into no row.
    period = torch.arange(251, dtype=weight.dtype)
    flat = weight.view(-1)
    whole = flat.numel() // 251 * 251
    flat[:whole].view(-1, 251).copy_(period)
    flat[whole:].copy_(period[: flat.numel() - whole])


class _Packer:
    """Packs weight after weight. What a kernel makes of a shape is looked at once, in a weight that shows it."""

    def __init__(self, filled: bool) -> None:
        self._filled = filled
        self._known: dict[tuple[torch.Size, torch.dtype], int] = {}
        self._zeros: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        try:
            self._in_place: InPlace | None = InPlace()
        except NotTaken:
            self._in_place = None

    def pack(self, weight: torch.Tensor) -> tuple[Callable[..., torch.Tensor], int | None]:
        """(the product with `weight`, rows in a block); None when the weight stays plain."""
        key = (weight.shape, weight.dtype)
        known = self._known.get(key)
        if known is None and not self._filled:
            _tell_apart(weight)
        product, rows = self._by_kernel(weight, known) if _by_packed_kernel(weight) else self._by_handler(weight, known)
        if rows is not None:
            self._known[key] = rows
        return product, rows

    def _by_kernel(self, weight: torch.Tensor, known: int | None) -> tuple[Callable[..., torch.Tensor], int | None]:
        if known is not None and not self._filled:
            return _packed_product, known
        packed = torch.ops._C.convert_weight_packed(weight)
        # For small shapes vLLM's packed weight may be of another dtype and size, and cannot be the parameter.
        same = packed.shape == weight.shape and packed.dtype == weight.dtype
        if same and (rows := known or rows_of(packed, weight)) is not None:
            weight.copy_(packed)
            return _packed_product, rows
        return _plain_product, None

    def _blank(self, weight: torch.Tensor) -> torch.Tensor:
        """Zeros of the weight's shape, to be packed instead of reading all of an empty weight."""
        key = (weight.shape, weight.dtype)
        if key not in self._zeros:
            self._zeros[key] = torch.zeros_like(weight)
        return self._zeros[key]

    def _by_handler(self, weight: torch.Tensor, known: int | None) -> tuple[Callable[..., torch.Tensor], int | None]:
        if self._in_place is not None:
            plain = weight.clone() if known is None else weight[:known].clone()
            blank = self._blank(weight) if known is not None and not self._filled else None
            try:
                handler = self._in_place.handler(weight, blank)
            except (NotTaken, RuntimeError):
                if known is not None:
                    raise
                weight.copy_(plain)
            else:
                if known is not None and torch.equal(weight[:known], pack_rows(plain, known)):
                    return _handler_product(handler), known
                if known is not None:
                    raise LocalFault(f"oneDNN packed one weight of shape {tuple(weight.shape)} unlike another")
                if (rows := rows_of(weight, plain)) is not None:
                    return _handler_product(handler), rows
                # It is packed in a way that is not understood: the handler goes unused, and is never freed.
                weight.copy_(plain)
        return (handlers.linear(weight) if handlers.supported() else _plain_product), None


def _packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias for x (..., K) and a packed `weight` (N, K); bias in float32, result (..., N)."""
    result: torch.Tensor = ops.weight_packed_linear_cpu(x, weight, weight.size(0), bias)
    return result


def _plain_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # `keep_plain` widened the bias for the packed kernel, which then could not take the weight.
    return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _handler_product(handler: Any) -> Callable[..., torch.Tensor]:
    def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = ops.onednn_mm(handler, x, bias)
        return result

    return product
