"""Devices of another container are read there, and what is wrong with them is said here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.agent.devices.base import DeviceBackend, Wanted
from relight.agent.devices.elsewhere import DevicesElsewhere
from relight.agent.devices.host import Host
from relight.agent.devices.kunlun import KunlunDevices
from relight.agent.devices.reader import NOTHING_HERE, serve
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput, Unavailable
from support.trees import Tree, kunlun_host

CLOCK = SystemClock()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return kunlun_host(Tree(tmp_path), used_mib={0: 90440})


@pytest.fixture
def socket_path(tmp_path: Path, host: Host) -> Iterator[Path]:
    path = tmp_path / "s" / "devices.sock"
    server = serve(path, host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield path
    server.shutdown()
    server.server_close()
    thread.join()


def _elsewhere(
    path: Path, kind: str = "kunlun", wanted: Wanted | None = None, patience: float = 5.0
) -> DevicesElsewhere:
    return DevicesElsewhere(path, kind, wanted or Wanted(), CLOCK, patience)


@pytest.mark.parametrize("question", ["enumerate", "processes", "readings", "links", "facts"])
def test_every_answer_is_the_same_there_and_here(socket_path: Path, host: Host, question: str) -> None:
    def ask(backend: DeviceBackend) -> Any:
        return getattr(backend, question)()

    assert ask(_elsewhere(socket_path)) == ask(KunlunDevices(host, Wanted()))


def test_which_devices_the_agent_says_and_auto_finds_out(socket_path: Path) -> None:
    found = _elsewhere(socket_path, "auto", Wanted(("3", "1"), 2))
    assert (found.kind, [d.visible_as for d in found.enumerate()]) == ("kunlun", ["3", "1"])


def test_what_cannot_be_told_there_is_refused_here_by_name(socket_path: Path) -> None:
    with pytest.raises(InvalidInput, match="XPU_VISIBLE_DEVICES: expected an index that is there"):
        _elsewhere(socket_path, wanted=Wanted(("9",)))
    with pytest.raises(InvalidInput, match="cpu or kunlun or nvidia"):
        _elsewhere(socket_path, "tpu")


def test_a_driver_that_does_not_answer_there_is_unavailable_here(socket_path: Path) -> None:
    with pytest.raises(Unavailable, match="NVIDIA's driver does not answer"):
        _elsewhere(socket_path, "nvidia", patience=0.0)


def test_a_reader_that_went_away_is_unavailable_and_one_that_never_was_is_waited_for(
    tmp_path: Path, host: Host
) -> None:
    path = tmp_path / "devices.sock"
    with pytest.raises(Unavailable, match="which may show none"):
        _elsewhere(path, patience=0.0)
    server = serve(path, host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found = _elsewhere(path)
    server.shutdown()
    server.server_close()
    thread.join()
    with pytest.raises(Unavailable):
        found.readings()


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b'{"kind": "kunlun"}', b'{"kind": "kunlun", "visible": 3, "count": 1}']
)
def test_what_is_no_question_gets_an_answer_that_says_so(host: Host, tmp_path: Path, line: bytes) -> None:
    server = serve(tmp_path / "x.sock", host)
    reply = server.reader.answer(line)
    server.server_close()
    assert not reply["ok"]
    assert reply["error"]


def test_its_socket_is_its_owners_alone(socket_path: Path) -> None:
    assert socket_path.stat().st_mode & 0o777 == 0o600


def test_it_leaves_where_there_is_nothing_to_read(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "relight.agent.devices.reader", "--socket", tmp_path / "s"]
    done = subprocess.run([*argv, "--beside", str(os.getpid())], timeout=30, check=False)
    assert done.returncode == NOTHING_HERE
