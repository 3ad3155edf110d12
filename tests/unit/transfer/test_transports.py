"""What the socket transports refuse, whoever sends it."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from pathlib import Path

import pytest

from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.transfer.segment import MappedPeer, Segment
from relight.transfer.transports import shm, tcp, wire
from relight.transfer.transports.base import Question
from tests.unit.transfer.conftest import Rig


@pytest.mark.parametrize(
    "hello", [b"", b"{}", b"[]", b"\xff\xfe", b'{"version": 1, "grant": "x"}', b'{"version": 3, "grant": 5}']
)
def test_a_hello_that_is_none_is_refused_and_the_source_goes_on(rig: Rig, hello: bytes) -> None:
    listener = tcp.TcpListener("127.0.0.1")
    address = listener.register(rig.source)
    try:
        with socket.create_connection(wire.parse_endpoint(address, "tcp", "tls"), timeout=5) as sock:
            wire.send_frame(sock, hello)
            assert wire.receive(sock, 1) == wire.REFUSED
            assert json.loads(wire.receive_frame(sock))["error"]
        reader = tcp.TcpReader(address, rig.grant(), "i-source", 5.0)
        assert reader.describe() == rig.source.manifest
        reader.close()
    finally:
        listener.release()


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_read(rig: Rig) -> None:
    listener = tcp.TcpListener("127.0.0.1")
    address = listener.register(rig.source)
    try:
        with socket.create_connection(wire.parse_endpoint(address, "tcp", "tls"), timeout=5) as sock:
            sock.sendall(struct.pack(">I", 1 << 31))
            assert wire.receive(sock, 1) == wire.REFUSED
            assert b"at most" in wire.receive_frame(sock)
    finally:
        listener.release()


@pytest.mark.parametrize(("offset", "length"), [(1 << 40, 1), (0, 1 << 40), (2**63, 2**63)])
def test_a_read_outside_the_segment_is_refused(rig: Rig, offset: int, length: int) -> None:
    listener = tcp.TcpListener("127.0.0.1")
    reader = tcp.TcpReader(listener.register(rig.source), rig.grant(), "i-source", 5.0)
    try:
        reader.ask(Question(0, 1, offset, length), memoryview(bytearray(16)))
        with pytest.raises(RemoteFault, match="lies outside"):
            reader.fill(16)
    finally:
        reader.close()
        listener.release()


@pytest.mark.parametrize("operation", [4, 255])
def test_a_question_that_does_not_exist_is_refused(rig: Rig, operation: int) -> None:
    listener = tcp.TcpListener("127.0.0.1")
    reader = tcp.TcpReader(listener.register(rig.source), rig.grant(), "i-source", 5.0)
    try:
        reader.sock.sendall(struct.pack(">BIIQQ", operation, 0, 0, 0, 0))
        with pytest.raises(RemoteFault, match=f"operation {operation} does not exist"):
            reader.status("refused a question")
    finally:
        reader.close()
        listener.release()


def test_a_source_that_says_nothing_is_given_up_at_the_deadline() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    with silent, pytest.raises(RemoteFault, match="no answer within"):
        tcp.TcpReader(f"tcp:127.0.0.1:{port}", "grant", "i-silent", 0.05)


def test_nobody_there_is_the_remotes_fault(tmp_path: Path) -> None:
    with pytest.raises(RemoteFault, match="cannot connect"):
        shm.ShmReader(f"unix:{tmp_path}/none.sock", "grant", "i-gone", 1.0)


@pytest.mark.parametrize("address", ["", "tcp:", "tcp:host", "tcp:host:99999", "unix:/x", "tcp:host:abc"])
def test_a_tcp_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="expected an address tcp:host:port"):
        wire.parse_endpoint(address, "tcp", "tls")


@pytest.mark.parametrize("address", ["", "unix:", "unix:relative", "tcp:h:1"])
def test_a_shm_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="expected an address unix:/path"):
        shm.parse_address(address)


def test_a_reader_cannot_write_the_sources_pages(rig: Rig) -> None:
    descriptor = rig.source.segment.readonly_fd()
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)


def test_a_segment_that_could_shrink_under_the_reader_is_refused() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 21)
    with pytest.raises(LocalFault, match="not sealed against shrinking"):
        MappedPeer(descriptor)


def test_the_socket_of_a_source_is_for_its_owner_alone(rig: Rig, tmp_path: Path) -> None:
    listener = shm.ShmListener(tmp_path / "own.sock")
    listener.register(rig.source)
    try:
        assert (tmp_path / "own.sock").stat().st_mode & 0o777 == 0o600
    finally:
        listener.release()
    assert not (tmp_path / "own.sock").exists()


def test_dropped_pages_read_as_zeros_and_occupy_nothing() -> None:
    segment = Segment("drop", 4 << 20)
    segment.populate(0, segment.bytes)
    segment.view[:5] = b"hello"
    assert segment.resident_bytes() == segment.bytes
    segment.drop()
    assert segment.resident_bytes() == 0
    assert bytes(segment.view[:5]) == bytes(5)
    segment.close()


def test_a_reason_arrives_although_the_reader_had_sent_more_questions_than_were_read(rig: Rig) -> None:
    listener = tcp.TcpListener("127.0.0.1")
    address = listener.register(rig.source)
    try:
        with socket.create_connection(wire.parse_endpoint(address, "tcp", "tls"), timeout=10) as sock:
            hello = json.dumps({"version": 1, "grant": "nonsense"}).encode()
            sock.sendall(len(hello).to_bytes(4, "big") + hello + bytes(4096))
            # Until the source has said all it will say: a reset would now have taken it back.
            ended = select.poll()
            ended.register(sock, select.POLLRDHUP)
            assert ended.poll(10_000)
            said = b"".join(iter(lambda: sock.recv(4096), b""))
    finally:
        listener.release()
    assert b"error" in said
