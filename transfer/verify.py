"""Digests of tensors as their bytes arrive, while they are still in the processor's cache.

XXH3-128 (xxhash): it finds accidents, mix-ups, truncation and stale generations at memory speed. It is no
protection against a peer that forges bytes together with the manifest; grants and TLS are.
"""

from __future__ import annotations

import xxhash

from relight.core.errors import RemoteFault


def digest(buffer: memoryview) -> str:
    """32 hexadecimal digits of XXH3-128 of `buffer`."""
    return xxhash.xxh3_128_hexdigest(buffer)


class Running:
    """The digest of one tensor whose bytes come in order, in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        self._state.update(piece)

    def check(self, name: str, expected: str, source: str) -> None:
        """Raises RemoteFault naming the tensor when its bytes are not those of the manifest."""
        got = self._state.hexdigest()
        if got != expected:
            raise RemoteFault(f"tensor {name} from {source}: digest {got}, the manifest says {expected}")
