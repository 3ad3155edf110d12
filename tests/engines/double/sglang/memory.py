"""Memory that is given back and comes back empty, at the same address, as the memory saver does it: one tag each."""

from __future__ import annotations

import hashlib
import mmap
import zlib
from pathlib import Path

GARBAGE = b"\xa5"
TENSORS = 4


class Region:
    """Pages with a size that stays. `backup` says that their content is kept in host memory while they are away."""

    def __init__(self, size: int, *, backup: bool) -> None:
        self._size, self._backup = size, backup
        self._pages: mmap.mmap | None = None
        self._kept: bytes | None = None
        self._map(GARBAGE * size)

    def _map(self, content: bytes) -> None:
        self._pages = mmap.mmap(-1, self._size)
        self._pages.write(content)

    @property
    def mapped(self) -> bool:
        return self._pages is not None

    def write(self, content: bytes) -> None:
        """Replaces what lies in it."""
        assert self._pages is not None
        self._pages.seek(0)
        self._pages.write(content)

    def pause(self) -> None:
        """Gives the pages back."""
        assert self._pages is not None
        self._kept = self._pages[:] if self._backup else None
        self._pages.close()
        self._pages = None

    def resume(self, *, flipped: bool = False) -> None:
        """New pages: with the copy, or with whatever was there."""
        content, self._kept = self._kept or GARBAGE * self._size, None
        self._map(b"\x00" + content[1:] if flipped else content)

    def number(self) -> int:
        """Follows from every byte."""
        assert self._pages is not None
        return zlib.crc32(self._pages)

    def digests(self) -> dict[str, str]:
        """By the names of tensors, of which the last is a buffer."""
        assert self._pages is not None
        step = max(self._size // TENSORS, 1)
        names = [f"model.layers.{n}.weight" for n in range(TENSORS - 1)] + ["model.scale"]
        return {
            name: hashlib.sha256(self._pages[n * step : (n + 1) * step]).hexdigest()[:16]
            for n, name in enumerate(names)
        }


def checkpoint(directory: str) -> bytes:
    """The weights of a model's directory. Raises OSError."""
    return (Path(directory) / "weights.bin").read_bytes()
