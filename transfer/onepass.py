"""Copying what this process can reach, or receiving it from a socket, and digesting it on the way (`_onepass.c`).

Where the processor or the build has no such pass a copy is done in two: copied, then hashed while it is in the cache.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence

from relight.transfer.segment import copy, spans
from relight.transfer.verify import BLOCK_BYTES, DIGEST_BYTES, Digest

try:
    from relight.transfer._onepass import WIDEST
    from relight.transfer._onepass import copy as copy_and_digest
    from relight.transfer._onepass import receive as receive_and_digest
except ImportError:  # built without a compiler
    WIDEST = 0

WIDTH: int = WIDEST
"""Bits of the registers that the one pass uses here: 512, 256, or 0 where there is none."""
SHORT = 240
"""Bytes up to which XXH3 is another function: such blocks are hashed by themselves."""


def copied(
    into: memoryview, source: memoryview, parts: Sequence[tuple[int, int]], width: int = WIDTH,
    digest: Digest = Digest.XXH3,
) -> bytes:  # fmt: skip
    """Copies bytes [start, stop) for each of `parts`; returns the digests of their blocks, as `blocks_of` does.

    Both buffers have one length; edges count from their begin. In one pass what is hashed is what is stored: a source
    that changes meanwhile changes both. Nothing between parts is touched. Raises ValueError for a part outside the
    buffers or a `width` that the processor lacks, and has copied nothing then. Only XXH3 is done in one pass.
    """
    if len(into) != len(source) or not all(0 <= start < stop <= len(into) for start, stop in parts):
        raise ValueError("expected two buffers of one length and parts within them")
    if digest is not Digest.XXH3:
        width = 0
    if not width or any(0 < (stop - start) % BLOCK_BYTES <= SHORT for start, stop in parts):
        return b"".join([_copied(into[start:stop], source[start:stop], digest, width) for start, stop in parts])
    return _passed(into, source, parts, width)


def _copied(into: memoryview, source: memoryview, digest: Digest, width: int) -> bytes:
    if width and not 0 < len(into) % BLOCK_BYTES <= SHORT:
        return _passed(into, source, [(0, len(into))], width)
    found = []
    for start, stop in spans(0, len(into), BLOCK_BYTES):
        copy(into[start:stop], source[start:stop])
        found.append(digest.of(into[start:stop]))
    return b"".join(found)


def _passed(into: memoryview, source: memoryview, parts: Sequence[tuple[int, int]], width: int) -> bytes:
    edges = array("Q", [edge for part in parts for edge in part])
    return copy_and_digest(into, source, edges, BLOCK_BYTES, width)


def received(
    sock: socket.socket, into: memoryview, parts: Sequence[tuple[int, int]], width: int = WIDTH
) -> bytes:  # fmt: skip
    """Fills `into` from a plain socket; returns the XXH3 of the blocks of `parts`, which ascend, as `blocks_of` does.

    The interpreter is given up once, and each wait is bounded by the socket's timeout. Raises ValueError for a part
    outside `into` or a `width` that the processor lacks, and has received nothing then; OSError, of which a
    TimeoutError when nothing came; EOFError when the other end closed.
    """
    if not all(0 <= start < stop <= len(into) for start, stop in parts):
        raise ValueError("expected parts within the buffer")
    patience = sock.gettimeout()
    edges = array("Q", [edge for part in parts for edge in part])
    wait_ms = -1 if patience is None else int(patience * 1000)
    found = receive_and_digest(sock.fileno(), into, edges, BLOCK_BYTES, width, wait_ms)
    return _with_shorts(into, parts, found)


def _with_shorts(into: memoryview, parts: Sequence[tuple[int, int]], found: bytes) -> bytes:
    if not any(0 < (stop - start) % BLOCK_BYTES <= SHORT for start, stop in parts):
        return found
    whole, at = bytearray(found), 0
    for start, stop in parts:
        at += -(-(stop - start) // BLOCK_BYTES) * DIGEST_BYTES
        if 0 < (rest := (stop - start) % BLOCK_BYTES) <= SHORT:
            whole[at - DIGEST_BYTES : at] = Digest.XXH3.of(into[stop - rest : stop])
    return bytes(whole)
