"""Digests of weights, block by block, so that each block is hashed while it is still in the processor's cache.

XXH3-128 (xxhash): it finds accidents, mix-ups, truncation and stale generations at memory speed. It is no
protection against a peer that forges bytes together with the manifest; grants and TLS are.

A tensor is cut into blocks of BLOCK_BYTES from its own first byte; its identity is the digest of its blocks'
digests. So
any part of a tensor can be proven as it arrives, from whichever holder, and the tensor's name is known when it is
wrong.
"""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 512 << 10
"""What is copied, then hashed: block and source together stay in a second-level cache of 2 MiB."""
DIGEST_BYTES = 16

block_digest = xxhash.xxh3_128_digest
"""The 16 bytes of XXH3-128 of a buffer."""


def block_count(length: int) -> int:
    """Blocks of a tensor of `length` bytes; 0 for an empty one."""
    return -(-length // BLOCK_BYTES)


def blocks_of(buffer: memoryview) -> bytes:
    """DIGEST_BYTES for each block of `buffer`, in order."""
    return b"".join(block_digest(buffer[at : at + BLOCK_BYTES]) for at in range(0, len(buffer), BLOCK_BYTES))


def identity(blocks: bytes) -> str:
    """What names a tensor's content: 32 hexadecimal digits of XXH3-128 over its blocks' digests."""
    return xxhash.xxh3_128_hexdigest(blocks)
