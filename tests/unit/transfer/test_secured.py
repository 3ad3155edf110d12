"""Weights over TLS: both ends show a certificate of the fleet, and nobody falls back to the clear."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from relight.core.errors import InvalidInput, LocalFault, RemoteFault
from relight.core.tls import TlsFiles
from relight.plugin import settings
from relight.transfer.transports.base import Question
from relight.transfer.transports.tcp import TcpListener, TcpReader
from tests.unit.transfer.conftest import Rig

Files = Callable[[str], TlsFiles]


@pytest.fixture
def address(rig: Rig, certificates: Files) -> Iterator[str]:
    listener = TcpListener("127.0.0.1", tls=certificates("source"))
    yield listener.register(rig.source)
    listener.release()


def test_a_source_over_tls_says_so_in_its_address(address: str) -> None:
    assert address.startswith("tls:127.0.0.1:")


def test_a_receiver_of_another_authority_gets_nothing(rig: Rig, address: str, certificates: Files) -> None:
    with pytest.raises(RemoteFault):
        TcpReader(address, rig.grant(), "i-source", 5.0, certificates("stranger"))
    assert rig.source.readers == 0


def test_a_receiver_without_a_certificate_gets_nothing(rig: Rig, address: str) -> None:
    with pytest.raises(LocalFault, match="over TLS alone"):
        TcpReader(address, rig.grant(), "i-source", 5.0)
    with pytest.raises(RemoteFault):
        TcpReader(address.replace("tls:", "tcp:"), rig.grant(), "i-source", 5.0)
    assert rig.source.readers == 0


def test_a_receiver_with_a_certificate_never_reads_in_the_clear(rig: Rig, certificates: Files) -> None:
    listener = TcpListener("127.0.0.1")
    try:
        address = listener.register(rig.source)
        with pytest.raises(RemoteFault, match="in the clear"):
            TcpReader(address, rig.grant(), "i-source", 5.0, certificates("receiver"))
        with pytest.raises(RemoteFault, match="no TLS"):
            TcpReader(address.replace("tcp:", "tls:"), rig.grant(), "i-source", 5.0, certificates("receiver"))
    finally:
        listener.release()


def test_no_weight_is_readable_on_the_way(rig: Rig, address: str, certificates: Files) -> None:
    tensor = rig.source.manifest.tensors[0]
    host, port = address.removeprefix("tls:").split(":")
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def between() -> None:
            one, other = tap.accept()[0], socket.create_connection((host, int(port)))
            with closing(one), closing(other):

                def carry(a: socket.socket, b: socket.socket) -> None:
                    while data := a.recv(1 << 16):
                        seen.extend(data)
                        b.sendall(data)

                up = threading.Thread(target=carry, args=(one, other), daemon=True)
                up.start()
                carry(other, one)

        threading.Thread(target=between, daemon=True).start()
        reader = TcpReader(
            f"tls:127.0.0.1:{tap.getsockname()[1]}", rig.grant(), "i-source", 5.0, certificates("receiver")
        )
        into = bytearray(tensor.bytes)
        reader.ask(Question(0, 1, tensor.offset, 1 << 20), memoryview(into)[: 1 << 20])
        reader.fill(1 << 20)
        reader.close()
    assert into[: 1 << 20] == rig.source.segment.view[tensor.offset : tensor.offset + (1 << 20)]
    assert len(seen) > 1 << 20
    assert bytes(into[:64]) not in bytes(seen)


def test_a_certificate_that_cannot_be_read_is_this_members_fault(
    rig: Rig, address: str, certificates: Files, tmp_path: Path
) -> None:
    broken = replace(certificates("receiver"), certificate=tmp_path / "none.pem")
    with pytest.raises(LocalFault, match="certificate of this member"):
        TcpReader(address, rig.grant(), "i-source", 5.0, broken)
    with pytest.raises(LocalFault, match="certificate of this member"):
        TcpListener("127.0.0.1", tls=broken).register(rig.source)


def test_an_engine_is_told_all_three_files_or_none() -> None:
    told = {settings.INSTANCE: "i-a", settings.DIRECTORY: "/x", settings.BIND_HOST: "127.0.0.1"}
    assert settings.read(told).tls is None
    whole = told | dict.fromkeys(settings.TLS, "/x/y.pem")
    assert settings.read(whole).tls == TlsFiles(Path("/x/y.pem"), Path("/x/y.pem"), Path("/x/y.pem"))
    with pytest.raises(InvalidInput) as caught:
        settings.read(told | {settings.TLS[0]: "/x/y.pem"})
    assert {e.field for e in caught.value.errors} == set(settings.TLS[1:])
