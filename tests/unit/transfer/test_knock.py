"""Doors are tried with grants that open nothing, and what is told is what was met."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.core.errors import LocalFault, RemoteFault
from relight.core.records import Door
from relight.transfer import grants
from relight.transfer.knock import knock
from relight.transfer.transports import rdma, wire
from relight.transfer.transports.base import Question
from relight.transfer.transports.rdma import RdmaListener
from relight.transfer.transports.shm import ShmListener, listening_here
from relight.transfer.transports.tcp import TcpListener, TcpReader
from tests.unit.transfer.conftest import Rig
from tests.unit.transfer.fake_verbs import FakeDevice

CARDS = ("mlx5_0@127.0.0.1",)


@pytest.fixture(params=["shm", "tcp", "rdma"])
def door(request: pytest.FixtureRequest, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(rdma, "Device", FakeDevice)
    listener = {
        "shm": lambda: ShmListener(tmp_path / "s"),
        "tcp": lambda: TcpListener("127.0.0.1"),
        "rdma": lambda: RdmaListener("mlx5_0", "127.0.0.1"),
    }[request.param]()
    address = listener.register(rig.source)
    yield Door("b", request.param, "i-source", address, rig.grant(tries=True, manifest_digest=""))
    listener.release()


def test_a_door_that_is_open_is_reached_and_left(rig: Rig, door: Door) -> None:
    assert knock(door, CARDS, None)
    assert rig.source.close(5.0) == 0


def test_a_grant_that_tries_reads_nothing(rig: Rig) -> None:
    listener = TcpListener("127.0.0.1")
    grant = rig.grant(tries=True, manifest_digest="")
    address = listener.register(rig.source)
    for ask in (
        lambda reader: reader.describe(),
        lambda reader: reader.held(0, 1),
        lambda reader: (reader.ask(Question(0, 1, 0, 1), rig.target.view[:1]), reader.fill(1)),
    ):
        reader = TcpReader(address, grant, "i-source", 5.0)
        with pytest.raises(wire.Refused, match="lets its bearer in and no further"):
            ask(reader)
        reader.close()
    listener.release()


def test_a_grant_for_another_source_or_time_is_refused_and_no_verdict(rig: Rig, door: Door) -> None:
    for wrong in (rig.grant(tries=True, generation=7), rig.grant(tries=True, expires_at=0.0), ""):
        stale = Door(door.slot, door.transport, door.instance, door.address, wrong)
        with pytest.raises(wire.Refused):
            knock(stale, CARDS, None)


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_a_closed_port_is_not_reached(transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RemoteFault, match="cannot connect") as caught:
        knock(Door("b", transport, "i-b", f"{transport}:127.0.0.1:{port}", "g"), CARDS, None)
    assert not isinstance(caught.value, wire.Refused)


def test_a_socket_that_is_not_there_or_is_anothers_is_no_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(RemoteFault, match="cannot connect"):
        knock(Door("b", "shm", "i-b", f"unix:{tmp_path}/nobody", "g"), (), None)
    listener = listening_here(tmp_path / "s")

    def serve(sock: socket.socket) -> None:
        wire.receive_frame(sock)
        descriptor = os.memfd_create("x")
        os.write(descriptor, b"i-other")
        socket.send_fds(sock, [wire.OK], [descriptor])
        os.close(descriptor)

    acceptor = wire.Acceptor(listener, serve, "test")
    with pytest.raises(RemoteFault, match="i-other answers at"):
        knock(Door("b", "shm", "i-b", f"unix:{tmp_path}/s", "g"), (), None)
    acceptor.close()


def test_one_pair_of_cards_is_enough_and_the_other_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "Device", FakeDevice)
    listener = RdmaListener("mlx5_0", "127.0.0.1")
    address = listener.register(rig.source)
    grant = rig.grant(tries=True, manifest_digest="")
    both = Door("b", "rdma", "i-source", f"rdma:127.0.0.1:1+{address}", grant)
    said = knock(both, CARDS, None)
    assert said.startswith("1 of 2 pairs of cards reach each other; mlx5_0: ")
    with pytest.raises(LocalFault, match="no RDMA card"):
        knock(both, (), None)
    # What leaves by a card leaves from its own address.
    with pytest.raises(RemoteFault, match=r"cannot speak from 192\.0\.2\.1"):
        knock(Door("b", "rdma", "i-source", address, grant), ("mlx5_0@192.0.2.1",), None)
    listener.release()


def test_grants_that_read_are_what_they_were() -> None:
    key = grants.new_key()
    old = grants.mint(key, grants.Claims("s", 1, "", "r", 10.0))
    assert "tries" not in grants._unb64(old.partition(".")[0]).decode()
    claims = grants.check(key, old, now=1.0, source_instance="s", generation=1, manifest_digest=str)
    assert not claims.tries
