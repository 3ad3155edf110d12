"""Digests of weights, block by block, so that each block is hashed while it is still in the processor's cache.

XXH3-128 finds accidents, mix-ups, truncation and stale generations at memory speed. It is no protection against
somebody on the way who forges bytes. SHA-256 is: its digests are part of the manifest, whose own digest receivers have
from the controller (docs/adr/0025-what-a-digest-proves.md).

A tensor is cut into blocks of BLOCK_BYTES from its own first byte; its identity is the digest of its blocks'
digests. So any part of a tensor can be proven as it arrives, from whichever holder, and the tensor's name is known
when it is wrong.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import xxhash

BLOCK_BYTES = 512 << 10
"""What is copied, then hashed: block and source together stay in a second-level cache of 2 MiB."""
DIGEST_BYTES = 16


class Digest(StrEnum):
    """What digests blocks, in DIGEST_BYTES each. All members of a fleet use the same."""

    XXH3 = "xxh3"
    SHA256 = "sha256"
    """Its first half: nobody finds other bytes with the digest of given ones in fewer than 2^128 tries."""

    def of(self, buffer: memoryview) -> bytes:
        """DIGEST_BYTES of one block."""
        if self is Digest.XXH3:
            return xxhash.xxh3_128_digest(buffer)
        return hashlib.sha256(buffer).digest()[:DIGEST_BYTES]


def block_count(length: int) -> int:
    """Blocks of a tensor of `length` bytes; 0 for an empty one."""
    return -(-length // BLOCK_BYTES)


def blocks_of(buffer: memoryview, digest: Digest = Digest.XXH3) -> bytes:
    """DIGEST_BYTES for each block of `buffer`, in order."""
    return b"".join([digest.of(buffer[at : at + BLOCK_BYTES]) for at in range(0, len(buffer), BLOCK_BYTES)])


def identity(blocks: bytes) -> str:
    """What names a tensor's content: 32 hexadecimal digits of XXH3-128 over its blocks' digests."""
    return xxhash.xxh3_128_hexdigest(blocks)
