"""Sealing: a settled tree becomes a bundle on disk. The tree is only read, and has to stay as it was meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from relight.agent.cache import bundle, trees
from relight.agent.cache.bundle import FileEntry, Limits, Manifest, Sealed
from relight.agent.cache.key import CacheKey
from relight.agent.cache.signing import Signer
from relight.core.clock import Clock
from relight.core.errors import InvalidInput, Unavailable


@dataclass(frozen=True, slots=True)
class SealedTree:
    """A bundle ready to be published: what was signed, and the file with its body."""

    sealed: Sealed
    manifest: Manifest
    body: Path


@contextmanager
def sealing(
    root: Path, key: CacheKey, signer: Signer, clock: Clock, *, compile_seconds: float, limits: Limits
) -> Iterator[SealedTree]:
    """A bundle of what lies below `root`; its body is removed when the context ends.

    Raises Unavailable when the tree has not settled, or changes while it is read: try again later. Raises InvalidInput
    when there is nothing to seal, or it is too large.
    """
    before = trees.scan(root, key.engine)
    if not before.files:
        raise InvalidInput(f"nothing was compiled below {root}")
    if before.bytes > limits.body_bytes or len(before.files) > limits.files:
        raise InvalidInput(f"the bundle is too large: {before.bytes} bytes in {len(before.files)} files")
    if not before.quiet(clock.now()):
        raise Unavailable("the compile cache is still being written", retry_after=trees.QUIET_SECONDS)
    own = Path(tempfile.mkdtemp(prefix=f"{root.name}.sealing-", dir=root.parent))
    try:
        body = own / "body"
        with body.open("wb") as out:
            chunks = _copy(root, before, out)
        if (after := trees.scan(root, key.engine)).files != before.files or after.half_written:
            raise Unavailable("the compile cache was written while it was sealed", retry_after=trees.QUIET_SECONDS)
        mode = {False: stat.S_IFREG | 0o600, True: stat.S_IFREG | 0o700}
        files = tuple(FileEntry(f.path, mode[f.executable], f.mtime_ns // 10**9, f.bytes) for f in before.files)
        manifest = Manifest(key, str(root), bundle.finite(compile_seconds), files, chunks)
        data = bundle.dump(manifest)
        # What nobody would take must not be signed either.
        bundle.parse(data, limits)
        yield SealedTree(Sealed(data, signer.name, signer.sign(data)), manifest, body)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _copy(root: Path, tree: trees.Tree, out: BinaryIO) -> tuple[str, ...]:
    """Writes the files one after the other; returns the digests of the chunks."""
    chunks: list[str] = []
    digest, filled = hashlib.sha256(), 0
    for found in tree.files:
        left = found.bytes
        with _opened(root / found.path) as file:
            while left:
                data = file.read(min(left, bundle.CHUNK_BYTES - filled))
                if not data:
                    raise Unavailable(f"{found.path} shrank while it was sealed", retry_after=trees.QUIET_SECONDS)
                out.write(data)
                digest.update(data)
                left, filled = left - len(data), filled + len(data)
                if filled == bundle.CHUNK_BYTES:
                    chunks.append(digest.hexdigest())
                    digest, filled = hashlib.sha256(), 0
    if filled:
        chunks.append(digest.hexdigest())
    return tuple(chunks)


def _opened(path: Path) -> BinaryIO:
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
    except OSError as error:
        raise Unavailable(f"{path.name} went away while it was sealed", retry_after=trees.QUIET_SECONDS) from error
