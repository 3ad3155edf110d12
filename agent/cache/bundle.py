"""Bundles: the sealed compile artefacts of one start. A manifest, its signature, and a body. No I/O.

The body is the files one after the other in the manifest's order, proven in chunks of CHUNK_BYTES by SHA-256 (the
manifest is signed, and a forger must not find other bytes for it). The bundle is named by the SHA-256 of its manifest,
which names key, files, modes and chunks: so a name stands for one content for ever.

There is no archive format to be attacked by: a bundle has regular files alone, at relative paths below the engine's own
cache directories. A manifest from outside is hostile until `verify` has passed it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from relight.agent.cache.key import CacheKey, checked
from relight.agent.cache.signing import SIGNATURE_BYTES, Trust
from relight.core.errors import Denied, FieldError, InvalidInput

VERSION = 1
CHUNK_BYTES = 4 << 20
MODES = (stat.S_IFREG | 0o600, stat.S_IFREG | 0o700)
MAX_PATH = 1024
MAX_PART = 255
MAX_SECONDS = 1e7
_DIGEST = re.compile("[0-9a-f]{64}")
_COLUMNS = ("path", "mode", "mtime", "bytes")
_FIELDS = ("version", "key", "built_at", "compile_seconds", "files", "chunk_bytes", "chunks")
_KINDS = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a directory"), (stat.S_ISCHR, "a character device"),
          (stat.S_ISBLK, "a block device"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest bundle that is taken: bytes of its body, and files."""

    body_bytes: int = 8 << 30
    files: int = 200_000

    @property
    def manifest_bytes(self) -> int:
        """Room for a long path per file, and the key."""
        return min(self.files * 256 + (4 << 20), 128 << 20)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: POSIX path below the cache root, st_mode, mtime (whole seconds since the epoch: ninja compares them),
    bytes."""

    path: str
    mode: int
    mtime: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds. `built_at` is the cache root it was compiled under; `compile_seconds` what that took, as the
    start that compiled it measured; `chunks` are SHA-256, hexadecimal."""

    key: CacheKey
    built_at: str
    compile_seconds: float
    files: tuple[FileEntry, ...]
    chunks: tuple[str, ...]

    @property
    def body_bytes(self) -> int:
        return sum(f.bytes for f in self.files)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A manifest as it was signed."""

    manifest: bytes
    signer: str
    signature: bytes

    @property
    def name(self) -> str:
        """The bundle's name: 64 hexadecimal digits."""
        return hashlib.sha256(self.manifest).hexdigest()


class Piece(NamedTuple):
    """Bytes [start, stop) of a chunk, which belong at `offset` of the file with this index."""

    file: int
    offset: int
    start: int
    stop: int


def chunk_count(body_bytes: int) -> int:
    """Chunks of a body."""
    return -(-body_bytes // CHUNK_BYTES)


def chunk_length(body_bytes: int, number: int) -> int:
    """Bytes of one chunk: CHUNK_BYTES, except for the last."""
    return min(CHUNK_BYTES, body_bytes - number * CHUNK_BYTES)


def pieces(files: Sequence[FileEntry]) -> Iterator[list[Piece]]:
    """For each chunk in order, the parts of files that it holds."""
    made: list[Piece] = []
    filled = 0
    for index, entry in enumerate(files):
        offset = 0
        while offset < entry.bytes:
            take = min(entry.bytes - offset, CHUNK_BYTES - filled)
            made.append(Piece(index, offset, filled, filled + take))
            offset, filled = offset + take, filled + take
            if filled == CHUNK_BYTES:
                yield made
                made, filled = [], 0
    if made:
        yield made


def prove(manifest: Manifest, number: int, data: bytes | memoryview) -> None:
    """Raises Denied when `data` is not the chunk that was signed."""
    if hashlib.sha256(data).hexdigest() != manifest.chunks[number]:
        raise Denied(f"chunk {number} of the bundle is not what was signed: it was altered or cut")


def dump(manifest: Manifest) -> bytes:
    """Canonical UTF-8 JSON: equal manifests give equal bytes."""
    whole = {
        "version": VERSION,
        "key": dict(manifest.key.fields),
        "built_at": manifest.built_at,
        "compile_seconds": manifest.compile_seconds,
        "files": {c: [getattr(f, c) for f in manifest.files] for c in _COLUMNS},
        "chunk_bytes": CHUNK_BYTES,
        "chunks": list(manifest.chunks),
    }
    return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()


def verify(sealed: Sealed, trust: Trust, limits: Limits, key: CacheKey | None = None) -> Manifest:
    """The manifest, if a trusted key signed it, it fits the limits, and it is for `key` (when one is given).

    The signature is checked before anything inside is looked at. Raises Denied (unsigned, untrusted, altered, for
    another key) or InvalidInput (too large, not a bundle), naming what it was.
    """
    if len(sealed.manifest) > limits.manifest_bytes:
        raise InvalidInput(
            f"the bundle is too large: a manifest of {len(sealed.manifest)} bytes, {limits.manifest_bytes} are taken"
        )
    if len(sealed.signature) not in (0, SIGNATURE_BYTES):
        raise Denied(f"the bundle's signature has {len(sealed.signature)} bytes, not {SIGNATURE_BYTES}")
    trust.check(sealed.manifest, sealed.signer, sealed.signature)
    manifest = parse(sealed.manifest, limits)
    if key is not None and (other := key.differences(manifest.key)):
        raise Denied("the bundle is for another key: " + "; ".join(map(str, other[:5])), authenticated=True)
    return manifest


def parse(data: bytes, limits: Limits) -> Manifest:
    """The manifest in `data`. Raises InvalidInput naming the first field that does not fit."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidInput("not a bundle: its manifest is not JSON") from None
    if not isinstance(raw, dict) or set(raw) != set(_FIELDS):
        raise _wrong("manifest", f"an object with {', '.join(_FIELDS)}", sorted(raw) if isinstance(raw, dict) else raw)
    for name, wanted in (("version", VERSION), ("chunk_bytes", CHUNK_BYTES)):
        if type(raw[name]) is not int or raw[name] != wanted:
            raise _wrong(name, str(wanted), raw[name])
    built_at, seconds = raw["built_at"], raw["compile_seconds"]
    if not isinstance(built_at, str) or len(built_at) > MAX_PATH:
        raise _wrong("built_at", f"a text of at most {MAX_PATH}", built_at)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SECONDS:
        raise _wrong("compile_seconds", f"seconds from 0 to {MAX_SECONDS:g}", seconds)
    files = _files(raw["files"], limits)
    return Manifest(checked(raw["key"]), built_at, seconds, files, _chunks(raw["chunks"], sum(f.bytes for f in files)))


def _wrong(where: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput("not a bundle that is taken", [FieldError(where, expected, repr(got)[:120])])


def _files(raw: Any, limits: Limits) -> tuple[FileEntry, ...]:
    if not isinstance(raw, dict) or set(raw) != set(_COLUMNS):
        raise _wrong("files", f"an object with {', '.join(_COLUMNS)}", sorted(raw) if isinstance(raw, dict) else raw)
    count = len(raw["path"]) if isinstance(raw["path"], list) else 0
    for column, values in raw.items():
        if not isinstance(values, list) or len(values) != count:
            raise _wrong(f"files.{column}", "a list as long as the others", type(values).__name__)
    if count > limits.files:
        raise InvalidInput(f"the bundle is too large: {count} files, at most {limits.files} are taken")
    files = tuple(
        FileEntry(
            _path(path, n), _mode(mode, n), _natural(mtime, f"files.mtime[{n}]"), _natural(size, f"files.bytes[{n}]")
        )
        for n, (path, mode, mtime, size) in enumerate(zip(*(raw[c] for c in _COLUMNS), strict=True))
    )
    total = sum(f.bytes for f in files)
    if total > limits.body_bytes:
        raise InvalidInput(f"the bundle is too large: {total} bytes, at most {limits.body_bytes} are taken")
    _distinct(files)
    return files


def _path(path: object, n: int) -> str:
    where = f"files.path[{n}]"
    if not isinstance(path, str) or not path or len(path.encode(errors="replace")) > MAX_PATH:
        raise _wrong(where, f"a path of 1 to {MAX_PATH} bytes", path)
    if path.startswith("/"):
        raise _wrong(where, "a path inside the bundle's directory, not an absolute one", path)
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise _wrong(where, "a path inside the bundle's directory, without empty parts, '.' and '..'", path)
    if "\0" in path or "\\" in path or any(0xD800 <= ord(c) <= 0xDFFF for c in path):
        raise _wrong(where, "a path without NUL, backslash and surrogates", path)
    if any(len(part.encode()) > MAX_PART for part in parts):
        raise _wrong(where, f"parts of at most {MAX_PART} bytes", path)
    return path


def _mode(mode: object, n: int) -> int:
    if type(mode) is not int or mode not in MODES:
        kind = next((name for is_, name in _KINDS if type(mode) is int and 0 <= mode < 1 << 16 and is_(mode)), None)
        raise _wrong(f"files.mode[{n}]", "a regular file of its owner alone, 0100600 or 0100700", kind or mode)
    return mode


def _natural(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 50:
        raise _wrong(where, "an integer from 0 to 2^50", value)
    return value


def _distinct(files: Sequence[FileEntry]) -> None:
    """Two entries of one path would be a link in disguise; a file under a file cannot be."""
    known: set[str] = set()
    for path in (f.path for f in files):
        if path in known:
            raise _wrong("files.path", "a path once: there are no hard links in a bundle", path)
        known.add(path)
    for path in known:
        above = next((a for a in accumulate(path.split("/")[:-1], "{}/{}".format) if a in known), None)
        if above is not None:
            raise _wrong("files.path", "directories that are no files", f"{above} and {path}")


def _chunks(raw: object, total: int) -> tuple[str, ...]:
    wanted = chunk_count(total)
    if not isinstance(raw, list) or len(raw) != wanted:
        raise _wrong("chunks", f"{wanted} digests, from the files' bytes", len(raw) if isinstance(raw, list) else raw)
    for n, text in enumerate(raw):
        if not isinstance(text, str) or not _DIGEST.fullmatch(text):
            raise _wrong(f"chunks[{n}]", "64 hexadecimal digits", text)
    return tuple(raw)


def is_name(text: object) -> bool:
    """Whether `text` can name a bundle. What comes from a peer becomes part of a path only after this."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def finite(seconds: float) -> float:
    """A measured time as a manifest takes it: bounded, and a number."""
    return min(max(seconds, 0.0), MAX_SECONDS) if math.isfinite(seconds) else 0.0
