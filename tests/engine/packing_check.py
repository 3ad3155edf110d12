"""Run by test_packing.py in the engine environment: prints what it found about the ways of packing, as JSON."""

from __future__ import annotations

import json
import threading

import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

from relight.plugin.vllm import handlers, packing
from relight.plugin.vllm.in_place import PRIMITIVES, InPlace, NotTaken, find_slots
from relight.transfer.segment import Segment

SHAPES = ((576, 1536), (960, 576), (3072, 576), (4096, 1024))
BATCHES = (1, 2, 7, 33)
GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(torch.bfloat16)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def in_segment(segment: Segment, weight: torch.Tensor) -> torch.Tensor:
    whole = torch.frombuffer(segment.view, dtype=torch.bfloat16)
    return whole[: weight.numel()].view(weight.shape).copy_(weight)


def in_place() -> dict[str, object]:
    """Handlers inside a segment: vLLM's own numbers, and they follow what is written there."""
    maker = InPlace()
    equal = follows = shared = True
    rows: set[int | None] = set()
    for n, k in SHAPES:
        plain, other = random(n, k), random(n, k)
        segment = Segment("check", plain.nbytes)
        weight = in_segment(segment, plain)
        product = packing._handler_product(maker.handler(weight))
        compiled = torch.compile(lambda x, w=weight, p=product: p(x, w, None).relu())
        block = packing.rows_of(weight, plain)
        rows.add(block)
        ids = torch.randint(0, n, (3, 5), generator=GENERATOR)
        shared &= block is not None and torch.equal(packing.packed_rows(weight, ids, block), plain[ids])
        for now in (plain, other):
            usual = ops.create_onednn_mm(now.t(), PRIMITIVES)
            for batch in BATCHES:
                x = random(batch, k)
                equal &= torch.equal(product(x, weight, None), ops.onednn_mm(usual, x, None))
                follows &= torch.equal(compiled(x), ops.onednn_mm(usual, x, None).relu())
            if block is not None:
                weight.copy_(packing.pack_rows(other, block))
        segment.drop()
        follows &= not product(random(1, k), weight, None).any()
    return {"rows": sorted(map(str, rows)), "equal": equal, "follows": follows, "rows_readable": shared}


def compiled_as_plain() -> bool:
    """Whether compiled residual layers round in the same places on a packed embedding as on a plain one."""
    plain, mixers = random(1024, 576), [random(576, 576) / 24 for _ in range(8)]
    packed = torch.nn.Module()
    packed.weight = torch.nn.Parameter(packing.pack_rows(plain, 32), requires_grad=False)
    ways = (lambda ids: torch.nn.functional.embedding(ids, plain),
            lambda ids: packing.PackedEmbedding(32).embedding(packed, ids))  # fmt: skip

    def answer(embed: object, ids: torch.Tensor) -> torch.Tensor:
        residual = embed(ids)
        for mixer in mixers:
            wide = residual.float()
            normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
            residual = (normed @ mixer).float().add(wide).to(torch.bfloat16)
        return residual

    ids = torch.randint(0, 1024, (64,), generator=GENERATOR, dtype=torch.int32)
    with torch.inference_mode():
        one, other = (torch.compile(lambda ids, e=embed: answer(e, ids), dynamic=True)(ids) for embed in ways)
    return torch.equal(one, other)


def refusals() -> dict[str, object]:
    """A weight that does not fill whole blocks is left as it was; slots are as before, whatever happened."""
    before = [int.from_bytes(_memory(slot), "little") for slot in find_slots()]
    maker = InPlace()
    odd = random(1000, 1111)
    kept = odd.clone()
    try:
        maker.handler(odd)
        refused = False
    except NotTaken:
        refused = True
    # Another thread's request of exactly that size is not ours to answer.
    weight = random(960, 576)
    stop = threading.Event()

    def make_others() -> None:
        while not stop.is_set():
            ops.create_onednn_mm(random(960, 576).t(), PRIMITIVES)

    thread = threading.Thread(target=make_others)
    thread.start()
    found = [packing.rows_of(each, plain) for each, plain in (_packed(maker, weight.clone()) for _ in range(20))]
    stop.set()
    thread.join()
    after = [int.from_bytes(_memory(slot), "little") for slot in find_slots()]
    return {
        "refused": refused, "unchanged": torch.equal(odd, kept), "slots_restored": before == after,
        "others_left_alone": None not in found,
    }  # fmt: skip


def empty() -> dict[str, object]:
    """An engine without its weights packs as one with them: the same blocks, and products of what is written later."""
    same = computes = True
    filled, empties = packing._Packer(filled=True), packing._Packer(filled=False)
    for n, k in SHAPES * 2:
        plain = random(n, k)
        one, other = plain.clone(), torch.zeros_like(plain)
        product, rows = filled.pack(one)
        later, found = empties.pack(other)
        same &= rows == found
        other.copy_(one)
        x = random(3, k)
        computes &= torch.equal(product(x, one, None), later(x, other, None))
        _held.extend((one, other))
    return {"same": same, "computes": computes}


def _packed(maker: InPlace, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = plain.clone()
    maker.handler(weight)
    _held.append(weight)
    return weight, plain


_held: list[torch.Tensor] = []


def _memory(address: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, 8)


def apart() -> dict[str, object]:
    """Handlers apart from the weight: right, and compiled code follows weights that are dropped and filled anew."""
    worst = 0.0
    for n, k in SHAPES:
        weight = random(n, k)
        product = handlers.linear(weight)
        handlers.rebuild()
        for batch in BATCHES:
            x = random(batch, k)
            worst = max(worst, error(product(x, weight, None), x.double() @ weight.double().t()))
    weight = random(64, 96)
    product = handlers.linear(weight)
    handlers.rebuild()
    compiled = torch.compile(lambda x: product(x, weight, None).relu())
    x = random(4, 96)
    before = error(compiled(x), (x.double() @ weight.double().t()).relu())
    weight.copy_(random(64, 96))
    handlers.drop()
    try:
        compiled(x)
        refused = False
    except IndexError:
        refused = True
    handlers.rebuild()
    after = error(compiled(x), (x.double() @ weight.double().t()).relu())
    return {"worst": worst, "before": before, "refused_while_dropped": refused, "after": after}


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    found = {
        "slots": len(find_slots()),
        "in_place": in_place(),
        "refusals": refusals(),
        "apart": apart(),
        "empty": empty(),
    }
    print(json.dumps(found | {"compiled_as_plain": compiled_as_plain()}))


if __name__ == "__main__":
    main()
