"""What is transferred: tensor sizes, and bytes that differ everywhere."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "smollm2" / "model.safetensors"
GIB = 1 << 30
ALIGNMENT = 256
BLOCK = 1 << 20


def sizes(name: str) -> list[int]:
    """Bytes of each tensor of the body `1gib` (64 of 16 MiB) or `model` (the demo's)."""
    if name == "1gib":
        return [GIB // 64] * 64
    if name == "model":
        with MODEL.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return [t["data_offsets"][1] - t["data_offsets"][0] for n, t in header.items() if n != "__metadata__"]
    raise ValueError(f"expected the body 1gib or model, got {name!r}")


def offsets(of: list[int]) -> tuple[list[int], int]:
    """Where each tensor begins, and where the last one ends."""
    places, at = [], 0
    for size in of:
        places.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return places, at


def fill(view: memoryview) -> None:
    """Random blocks, each marked with its place: a block in the wrong place is another block."""
    block = bytearray(random.Random(7).randbytes(BLOCK))
    for at in range(0, len(view), BLOCK):
        block[:8] = struct.pack("<Q", at)
        view[at : at + BLOCK] = block[: len(view) - at]


def digest(view: memoryview, of: list[int]) -> bytes:
    """Names all tensors' bytes; what lies between them is nobody's."""
    state = hashlib.blake2b()
    for at, size in zip(offsets(of)[0], of, strict=True):
        state.update(view[at : at + size])
    return state.digest()
