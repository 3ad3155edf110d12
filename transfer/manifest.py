"""The weight manifest: every tensor of a running engine, where it lies in its segment, and its digests.

It is the post-processed state (what the kernels read), so nothing is recomputed on arrival. The export
covers parameters, buffers and tensors held as plain attributes; tied tensors appear once, with aliases;
host scalars (Python floats that kernels are called with, such as KV scales) apart.

A manifest that comes from a peer is hostile until `parse` has passed it: sizes are bounded, ranges lie
inside the segment and do not overlap, and byte counts follow from shape and dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

from relight.core.errors import FieldError, InvalidInput
from relight.core.fingerprint import Fingerprint
from relight.transfer.verify import BLOCK_BYTES, DIGEST_BYTES, Digest, block_count, identity

MAX_TENSORS = 1_000_000
MAX_NAME = 512
MAX_CANARY = 256
MAX_DIMENSIONS = 64
MAX_NUMBER = 1 << 50
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
Digests = bytes
"""Block digests one after the other."""
_DESCRIBED = ("name", "dtype", "shape", "stride", "offset", "bytes", "aliases")
_COLUMNS = (*_DESCRIBED, "blocks")
_HEX = re.compile("[0-9a-f]*")
_offset = attrgetter("offset")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `offset` and `bytes` within its segment; `stride` in elements; digests of its bytes.

    `blocks` holds DIGEST_BYTES for each BLOCK_BYTES of the tensor, and is empty while its content is nobody's business.
    It proves identity against accidents and mix-ups, not against a peer that forges both bytes and manifest: the grant
    says who that peer is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int
    aliases: tuple[str, ...] = ()
    blocks: Digests = b""

    @property
    def digest(self) -> str:
        """The tensor's identity: 32 hexadecimal digits."""
        return identity(self.blocks)


@dataclass(frozen=True, slots=True)
class Canary:
    """A short greedy generation of the source itself, and the log-probability (nats) of each token.

    `token_ids` and `logprobs` have equal length; `prompt_token_ids` has at least one id.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What one member of an instance offers: its fingerprint, its tensors in one segment, its scalars."""

    fingerprint: Fingerprint
    generation: int
    segment_bytes: int
    tensors: tuple[TensorEntry, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    canary: Canary | None = None
    digests: Digest = Digest.XXH3
    """What made the tensors' blocks."""

    @property
    def weight_bytes(self) -> int:
        """The sum of all tensors' bytes (padding between them left out)."""
        return sum(t.bytes for t in self.tensors)

    def digest(self) -> str:
        """Names tensors, places, digests and scalars; not the generation, the canary or the fingerprint."""
        described = [self.digests, _columns(self.tensors), sorted(self.scalars.items())]
        text = json.dumps(described, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def content_digest(self) -> str:
        """Names the content alone: tensor names and digests, and scalars, wherever they lie."""
        text = json.dumps(
            [sorted((t.name, t.digest) for t in self.tensors), sorted(self.scalars.items())], separators=(",", ":")
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _columns(tensors: tuple[TensorEntry, ...]) -> dict[str, list[object]]:
    # One list per field: a third of the bytes of an object per tensor, and checked column by column.
    made: dict[str, list[object]] = {f: [getattr(t, f) for t in tensors] for f in _DESCRIBED}
    return made | {"blocks": [t.blocks.hex() for t in tensors]}


def _plain(canary: Canary) -> dict[str, object]:
    return {name: getattr(canary, name) for name in canary.__dataclass_fields__}


def dump(manifest: WeightManifest) -> bytes:
    """The manifest as UTF-8 JSON."""
    prints, canary = manifest.fingerprint, manifest.canary
    whole = {
        "fingerprint": {p: dict(getattr(prints, p)) for p in ("layout", "content", "runtime")},
        "generation": manifest.generation,
        "segment_bytes": manifest.segment_bytes,
        "block_bytes": BLOCK_BYTES,
        "digests": manifest.digests,
        "tensors": _columns(manifest.tensors),
        "scalars": dict(manifest.scalars),
        "canary": None if canary is None else _plain(canary),
    }
    return json.dumps(whole, separators=(",", ":")).encode()


Where = tuple[str | int, ...]
"""A place in a manifest, ("tensors", 3, "shape"): put into words only when it is wrong."""


def _words(where: Where) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in where).removeprefix(".")


def _wrong(where: Where, expected: str, got: object) -> InvalidInput:
    return InvalidInput("not a valid manifest", [FieldError(_words(where), expected, repr(got)[:80])])


def _natural(value: object, where: Where) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise _wrong(where, f"an integer from 0 to {MAX_NUMBER}", value)
    return value


def _text(value: object, where: Where, most: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _wrong(where, f"a text of at most {most} characters", value)
    return value


def _texts(value: object, where: Where) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object of texts", value)
    return {_text(k, where): _text(v, (*where, k), 1 << 16) for k, v in value.items()}


def _several(value: object, where: Where) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise _wrong(where, f"a list of at most {MAX_DIMENSIONS}", value)
    return value


def _naturals(value: object, where: Where) -> tuple[int, ...]:
    return tuple([_natural(n, where) for n in _several(value, where)])


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last that a tensor touches, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _tensor(
    at: int, name: object, dtype: object, shape: object, stride: object, offset: object, size: object,
    aliases: object, blocks: object,
) -> TensorEntry:  # fmt: skip
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _wrong(("tensors", at, "dtype"), f"one of {', '.join(ITEM_BYTES)}", dtype)
    dimensions = _naturals(shape, ("tensors", at, "shape"))
    strides = _naturals(stride, ("tensors", at, "stride"))
    if len(dimensions) != len(strides):
        raise _wrong(("tensors", at, "stride"), f"{len(dimensions)} numbers", stride)
    length = _natural(size, ("tensors", at, "bytes"))
    if length != (wanted := _reach(dimensions, strides) * ITEM_BYTES[dtype]):
        raise _wrong(("tensors", at, "bytes"), f"{wanted}, from shape, stride and dtype", size)
    digits = 2 * DIGEST_BYTES * block_count(length)
    if not isinstance(blocks, str) or len(blocks) != digits or not _HEX.fullmatch(blocks):
        raise _wrong(("tensors", at, "blocks"), f"{digits} hexadecimal digits", blocks)
    names = tuple([_text(a, ("tensors", at, "aliases")) for a in _several(aliases, ("tensors", at, "aliases"))])
    return TensorEntry(
        _text(name, ("tensors", at, "name")), dtype, dimensions, strides,
        _natural(offset, ("tensors", at, "offset")), length, names, bytes.fromhex(blocks),
    )  # fmt: skip


def _tensors(raw: object, segment: int) -> tuple[TensorEntry, ...]:
    """The tensors of the columns in `raw`, each in a range of its own inside `segment` bytes."""
    if not isinstance(raw, dict) or set(raw) != set(_COLUMNS):
        raise _wrong(("tensors",), f"an object with {', '.join(_COLUMNS)}", raw)
    count = len(raw["name"]) if isinstance(raw["name"], list) else 0
    for key, column in raw.items():
        if not isinstance(column, list) or len(column) > MAX_TENSORS or len(column) != count:
            raise _wrong(("tensors", key), f"a list of at most {MAX_TENSORS}, as long as all others", type(column))
    tensors = tuple(map(_tensor, range(count), *(raw[key] for key in _COLUMNS)))
    end, names = 0, set()
    for t in sorted(tensors, key=_offset):
        if t.offset < end or t.offset + t.bytes > segment:
            raise _wrong((f"tensor {t.name}",), f"a range of its own inside {segment} bytes", (t.offset, t.bytes))
        if t.name in names:
            raise _wrong((f"tensor {t.name}",), "a name of its own", t.name)
        names.add(t.name)
        end = t.offset + t.bytes
    return tensors


def _canary(raw: object) -> Canary | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or set(raw) != set(Canary.__dataclass_fields__):
        raise _wrong(("canary",), f"an object with {', '.join(Canary.__dataclass_fields__)}", raw)
    for key, value in raw.items():
        if not isinstance(value, list) or not 0 < len(value) <= MAX_CANARY:
            raise _wrong(("canary", key), f"a list of 1 to {MAX_CANARY}", value)
    if len(raw["token_ids"]) != len(raw["logprobs"]):
        raise _wrong(("canary", "logprobs"), f"{len(raw['token_ids'])} numbers", raw["logprobs"])
    return Canary(
        tuple(_natural(n, ("canary", "prompt_token_ids")) for n in raw["prompt_token_ids"]),
        tuple(_natural(n, ("canary", "token_ids")) for n in raw["token_ids"]),
        tuple(_number(n, ("canary", "logprobs")) for n in raw["logprobs"]),
    )


def _number(value: object, where: Where) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(where, "a finite number", value)
    return float(value)


@lru_cache(maxsize=2)
def parse(data: bytes) -> WeightManifest:
    """The manifest in `data`. Raises InvalidInput naming the first field that does not fit.

    The last ones are remembered: a guardian wakes from the same source again and again.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidInput("not a valid manifest: not JSON") from None
    fields = {*WeightManifest.__dataclass_fields__, "block_bytes"}
    if not isinstance(raw, dict) or set(raw) != fields:
        raise _wrong(("manifest",), f"an object with {', '.join(sorted(fields))}", raw)
    prints = raw["fingerprint"]
    if not isinstance(prints, dict) or set(prints) != {"layout", "content", "runtime"}:
        raise _wrong(("fingerprint",), "layout, content, runtime", prints)
    if raw["block_bytes"] != BLOCK_BYTES:
        raise _wrong(("block_bytes",), str(BLOCK_BYTES), raw["block_bytes"])
    if raw["digests"] not in list(Digest):
        raise _wrong(("digests",), " or ".join(Digest), raw["digests"])
    segment = _natural(raw["segment_bytes"], ("segment_bytes",))
    scalars = raw["scalars"]
    if not isinstance(scalars, dict) or len(scalars) > MAX_TENSORS:
        raise _wrong(("scalars",), "an object of numbers", type(scalars))
    return WeightManifest(
        Fingerprint(**{part: _texts(prints[part], ("fingerprint", part)) for part in prints}),
        _natural(raw["generation"], ("generation",)),
        segment,
        _tensors(raw["tensors"], segment),
        {_text(k, ("scalars",)): _number(v, ("scalars", k)) for k, v in scalars.items()},
        _canary(raw["canary"]),
        Digest(raw["digests"]),
    )
