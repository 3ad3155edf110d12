"""The weight manifest: every tensor of a running engine, where it lies in its segment, and its digest.

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
from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.core.errors import FieldError, InvalidInput
from relight.core.fingerprint import Fingerprint

MAX_TENSORS = 1_000_000
MAX_NAME = 512
MAX_CANARY = 256
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `offset` and `bytes` within its segment; `stride` in elements; digest of its bytes.

    `digest` is 32 hexadecimal digits of XXH3-128. It proves identity against accidents and mix-ups, not
    against a peer that forges both bytes and manifest: the grant says who that peer is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int
    digest: str
    aliases: tuple[str, ...] = ()


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

    @property
    def weight_bytes(self) -> int:
        """The sum of all tensors' bytes (padding between them left out)."""
        return sum(t.bytes for t in self.tensors)

    def digest(self) -> str:
        """Names tensors, places, digests and scalars; not the generation, the canary or the fingerprint."""
        text = json.dumps(
            [[_plain(t) for t in self.tensors], sorted(self.scalars.items())], sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def content_digest(self) -> str:
        """Names the content alone: tensor names and digests, and scalars, wherever they lie."""
        text = json.dumps(
            [sorted((t.name, t.digest) for t in self.tensors), sorted(self.scalars.items())], separators=(",", ":")
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(record: TensorEntry | Canary) -> dict[str, object]:
    # asdict copies deeply: over hundreds of tensors that is ten milliseconds of every wake.
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def dump(manifest: WeightManifest) -> bytes:
    """The manifest as UTF-8 JSON."""
    prints, canary = manifest.fingerprint, manifest.canary
    whole = {
        "fingerprint": {p: dict(getattr(prints, p)) for p in ("layout", "content", "runtime")},
        "generation": manifest.generation,
        "segment_bytes": manifest.segment_bytes,
        "tensors": [_plain(t) for t in manifest.tensors],
        "scalars": dict(manifest.scalars),
        "canary": None if canary is None else _plain(canary),
    }
    return json.dumps(whole, separators=(",", ":")).encode()


def _wrong(name: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput("not a valid manifest", [FieldError(name, expected, repr(got)[:80])])


def _natural(value: object, name: str, most: int = 1 << 50) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong(name, f"an integer from 0 to {most}", value)
    return value


def _text(value: object, name: str, most: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _wrong(name, f"a text of at most {most} characters", value)
    return value


def _texts(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(name, "an object of texts", value)
    return {_text(k, name): _text(v, f"{name}.{k}", 1 << 16) for k, v in value.items()}


def _tensor(raw: object, at: str) -> TensorEntry:
    if not isinstance(raw, dict) or set(raw) != set(TensorEntry.__dataclass_fields__):
        raise _wrong(at, f"an object with {', '.join(TensorEntry.__dataclass_fields__)}", raw)
    dtype = _text(raw["dtype"], f"{at}.dtype")
    if dtype not in ITEM_BYTES:
        raise _wrong(f"{at}.dtype", f"one of {', '.join(ITEM_BYTES)}", dtype)
    for key in ("shape", "stride", "aliases"):
        if not isinstance(raw[key], list) or len(raw[key]) > 64:
            raise _wrong(f"{at}.{key}", "a list of at most 64", raw[key])
    shape = tuple(_natural(n, f"{at}.shape") for n in raw["shape"])
    stride = tuple(_natural(n, f"{at}.stride") for n in raw["stride"])
    if len(shape) != len(stride):
        raise _wrong(f"{at}.stride", f"{len(shape)} numbers", stride)
    size = _natural(raw["bytes"], f"{at}.bytes")
    reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if size != reach * ITEM_BYTES[dtype]:
        raise _wrong(f"{at}.bytes", f"{reach * ITEM_BYTES[dtype]}, from shape, stride and dtype", size)
    digest = _text(raw["digest"], f"{at}.digest", 32)
    if len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        raise _wrong(f"{at}.digest", "32 hexadecimal digits", digest)
    return TensorEntry(
        _text(raw["name"], f"{at}.name"), dtype, shape, stride, _natural(raw["offset"], f"{at}.offset"), size, digest,
        tuple(_text(a, f"{at}.aliases") for a in raw["aliases"]),
    )  # fmt: skip


def _canary(raw: object) -> Canary | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or set(raw) != set(Canary.__dataclass_fields__):
        raise _wrong("canary", f"an object with {', '.join(Canary.__dataclass_fields__)}", raw)
    for key, value in raw.items():
        if not isinstance(value, list) or not 0 < len(value) <= MAX_CANARY:
            raise _wrong(f"canary.{key}", f"a list of 1 to {MAX_CANARY}", value)
    if len(raw["token_ids"]) != len(raw["logprobs"]):
        raise _wrong("canary.logprobs", f"{len(raw['token_ids'])} numbers", raw["logprobs"])
    return Canary(
        tuple(_natural(n, "canary.prompt_token_ids") for n in raw["prompt_token_ids"]),
        tuple(_natural(n, "canary.token_ids") for n in raw["token_ids"]),
        tuple(_number(n, "canary.logprobs") for n in raw["logprobs"]),
    )


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, "a finite number", value)
    return float(value)


def parse(data: bytes) -> WeightManifest:
    """The manifest in `data`. Raises InvalidInput naming the first field that does not fit."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidInput("not a valid manifest: not JSON") from None
    if not isinstance(raw, dict) or set(raw) != set(WeightManifest.__dataclass_fields__):
        raise _wrong("manifest", f"an object with {', '.join(WeightManifest.__dataclass_fields__)}", raw)
    prints = raw["fingerprint"]
    if not isinstance(prints, dict) or set(prints) != {"layout", "content", "runtime"}:
        raise _wrong("fingerprint", "layout, content, runtime", prints)
    segment = _natural(raw["segment_bytes"], "segment_bytes")
    if not isinstance(raw["tensors"], list) or len(raw["tensors"]) > MAX_TENSORS:
        raise _wrong("tensors", f"a list of at most {MAX_TENSORS}", type(raw["tensors"]))
    tensors = tuple(_tensor(t, f"tensors[{i}]") for i, t in enumerate(raw["tensors"]))
    end, names = 0, set()
    for t in sorted(tensors, key=lambda t: t.offset):
        if t.offset < end or t.offset + t.bytes > segment:
            raise _wrong(f"tensor {t.name}", f"a range of its own inside {segment} bytes", (t.offset, t.bytes))
        if t.name in names:
            raise _wrong(f"tensor {t.name}", "a name of its own", t.name)
        names.add(t.name)
        end = t.offset + t.bytes
    scalars = raw["scalars"]
    if not isinstance(scalars, dict) or len(scalars) > MAX_TENSORS:
        raise _wrong("scalars", "an object of numbers", type(scalars))
    return WeightManifest(
        Fingerprint(**{part: _texts(prints[part], f"fingerprint.{part}") for part in prints}),
        _natural(raw["generation"], "generation"),
        segment,
        tensors,
        {_text(k, "scalars"): _number(v, f"scalars.{k}") for k, v in scalars.items()},
        _canary(raw["canary"]),
    )
