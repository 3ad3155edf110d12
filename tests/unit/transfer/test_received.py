"""Receiving and digesting without the interpreter: the same bytes and digests however they come, and named failures."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.transfer.onepass import SHORT, WIDTH, received
from relight.transfer.verify import BLOCK_BYTES, blocks_of
from tests.unit.transfer.test_onepass import SOURCE, WIDTHS, lengths

pytestmark = pytest.mark.skipif(not WIDTH, reason="written for x86-64 with AVX2; elsewhere it is done in steps")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def _sending(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> threading.Thread:
    def send() -> None:
        for piece in pieces:
            sock.sendall(piece)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), lengths()), max_size=6),
    st.lists(st.integers(1, 3 * BLOCK_BYTES), max_size=8),
    st.sampled_from([w for w in WIDTHS if w] or [0]), st.booleans(),
)  # fmt: skip
def test_however_bytes_come_they_are_in_place_and_their_digests_are_the_sources(
    drawn: list[tuple[int, int]], sizes: list[int], width: int, bounded: bool
) -> None:
    parts, at = [], 0
    for gap, length in drawn:
        if at + gap + length <= len(SOURCE):
            parts.append((at + gap, at + gap + length))
            at += gap + length
    source = memoryview(SOURCE)
    pieces, sent = [], 0
    for size in sizes:
        pieces.append(source[sent : sent + size])
        sent += len(pieces[-1])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0 if bounded else None)
        thread = _sending(theirs, [*pieces, source[sent:]])
        into = bytearray(len(SOURCE))
        found = received(ours, memoryview(into), parts, width)
        thread.join()
    assert into == SOURCE
    assert found == b"".join(blocks_of(source[a:b]) for a, b in parts)


def test_what_belongs_to_the_next_answer_stays_in_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(bytes(5000) + b"next")
    received(ours, memoryview(bytearray(5000)), [(0, 5000)])
    assert ours.recv(10) == b"next"


@pytest.mark.parametrize("sent", [0, 1, BLOCK_BYTES + 5])
def test_a_connection_that_ends_in_the_middle_is_an_end(pair: tuple[socket.socket, socket.socket], sent: int) -> None:
    ours, theirs = pair

    def send() -> None:
        theirs.sendall(bytes(sent))
        theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(EOFError, match="closed"):
        received(ours, memoryview(bytearray(2 * BLOCK_BYTES)), [(0, 2 * BLOCK_BYTES)])
    thread.join()


def test_silence_ends_with_the_sockets_own_time_out(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.settimeout(0.05)
    theirs.sendall(b"x")
    with pytest.raises(TimeoutError):
        received(ours, memoryview(bytearray(4096)), [(0, 4096)])


def test_a_broken_connection_is_an_error_of_the_system(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    number = ours.detach()
    gone = socket.socket(fileno=number)
    gone.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        received(gone, memoryview(bytearray(4096)), [(0, 4096)])


@pytest.mark.parametrize(
    "parts",
    [[(0, 4097)], [(300, 200)], [(0, 1000), (500, 1500)], [(1000, 2000), (0, 500)], [(1 << 63, (1 << 63) + 4096)]],
)
def test_parts_that_are_none_are_refused_and_nothing_is_received(
    pair: tuple[socket.socket, socket.socket], parts: list[tuple[int, int]]
) -> None:
    ours, theirs = pair
    theirs.sendall(b"untouched")
    with pytest.raises(ValueError, match="parts within"):
        received(ours, memoryview(bytearray(4096)), parts)
    assert ours.recv(20) == b"untouched"


def test_a_width_that_the_processor_lacks_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="width"):
        received(pair[0], memoryview(bytearray(4096)), [(0, 4096)], 1024)


@pytest.mark.parametrize("length", [1, 17, SHORT, SHORT + 1, BLOCK_BYTES + 1, BLOCK_BYTES + SHORT])
def test_blocks_too_short_for_the_pass_have_their_digest_all_the_same(
    pair: tuple[socket.socket, socket.socket], length: int
) -> None:
    ours, theirs = pair
    body = random.Random(3).randbytes(length)
    thread = _sending(theirs, [body])
    assert received(ours, memoryview(bytearray(length)), [(0, length)]) == blocks_of(memoryview(body))
    thread.join()
