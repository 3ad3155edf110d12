"""Installing: a bundle is staged beside its place, proven chunk by chunk, and renamed into it as a whole.

Until the rename nothing is changed that an engine could see; whatever fails before it leaves no trace. Files are made
anew (never through a link, never over another), with the modes of the manifest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relight.agent.cache import bundle, trees
from relight.agent.cache.bundle import FileEntry, Manifest
from relight.agent.cache.reading import Opened
from relight.core import failpoints
from relight.core.errors import InvalidInput, LocalFault


@dataclass(frozen=True, slots=True)
class Installed:
    """A bundle is in its place: how much of it, and which kinds of cache were left out and why."""

    bundle: str
    files: int
    bytes: int
    left_out: Mapping[str, str]


def install(opened: Opened, root: Path) -> Installed:
    """Makes `root`, which must not exist or be empty, hold the bundle's files.

    Raises InvalidInput (a path that is no place of the engine's), Denied or RemoteFault (bytes that were not signed, no
    holder left), LocalFault (the place is taken, the disk is full). Nothing is left behind then.
    """
    manifest = opened.manifest
    skipped = _placed(manifest, root)
    if root.is_symlink() or (root.exists() and (not root.is_dir() or any(root.iterdir()))):
        raise LocalFault(f"{root} is in use: a bundle is installed into a place of its own")
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In the same directory, so that the rename stays within one file system.
    staging = Path(tempfile.mkdtemp(prefix=f"{root.name}.staging-", dir=root.parent))
    try:
        written = _write(opened, staging, skipped)
        failpoints.hit("cache.install.before-rename")
        staging.rename(root)
    except OSError as error:
        raise LocalFault(f"the bundle could not be installed: {error.strerror} ({root})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Installed(opened.name, len(written), sum(f.bytes for f in written), skipped)


def _placed(manifest: Manifest, root: Path) -> dict[str, str]:
    """Checks that each file belongs to a cache of the engine; returns the kinds that are of no use at `root`."""
    skipped: dict[str, str] = {}
    engine = manifest.key.engine
    for entry in manifest.files:
        kind = trees.kind_of(engine, entry.path)
        if kind is None:
            raise InvalidInput(f"the bundle has {entry.path!r}, which is no compile cache of {engine}")
        if kind.bound and manifest.built_at != str(root):
            skipped[kind.name] = f"remembers that it was built at {manifest.built_at}, and this is {root}"
    return skipped


def _write(opened: Opened, staging: Path, skipped: Mapping[str, str]) -> list[FileEntry]:
    manifest = opened.manifest
    wanted: list[FileEntry | None] = []
    for entry in manifest.files:
        kind = trees.kind_of(manifest.key.engine, entry.path)
        wanted.append(None if kind is None or kind.name in skipped else entry)
    current, fd = -1, -1
    try:
        for data, parts in zip(opened.chunks(), bundle.pieces(manifest.files), strict=True):
            for part in parts:
                target = wanted[part.file]
                if target is None:
                    continue
                if part.file != current:
                    if fd >= 0:
                        os.close(fd)
                    current, fd = part.file, _created(staging, target)
                _write_all(fd, data[part.start : part.stop])
    finally:
        if fd >= 0:
            os.close(fd)
    kept = [entry for entry in wanted if entry is not None]
    for entry in kept:
        if not entry.bytes:
            os.close(_created(staging, entry))
        # Last: writing changes it.
        os.utime(staging / entry.path, (entry.mtime, entry.mtime))
    return kept


def _created(staging: Path, entry: FileEntry) -> int:
    path = staging / entry.path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, entry.mode & 0o700)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def clear(root: Path) -> None:
    """Removes what an engine left at `root`, and what a killed installation left beside it."""
    shutil.rmtree(root, ignore_errors=True)
    for rest in ("staging", "sealing"):
        for path in root.parent.glob(f"{root.name}.{rest}-*"):
            shutil.rmtree(path, ignore_errors=True)
