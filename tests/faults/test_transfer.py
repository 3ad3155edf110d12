"""Transfers between real processes that are killed, crawl, lie or run out of room: never a wrong byte, never a hang."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.holder import LAYOUT, fill, table

from relight.core.clock import SystemClock
from relight.core.errors import LocalFault, ModelDirty, RemoteFault
from relight.transfer import grants
from relight.transfer.chunks import cut
from relight.transfer.request import Holder, Options, Received, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.transports.tcp import TcpReader

ROOT = Path(__file__).resolve().parents[2]
BODY = 16 << 20
CLOCK = SystemClock()
KILLS = 100
RECEIVERS = 64


class Field:
    """Processes and segments of one test; none outlives it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._expected = self.segment("expected", BODY)
        fill(self._expected, BODY)
        self.count = len(cut(table(BODY)))

    def segment(self, name: str, length: int = BODY, descriptor: int | None = None) -> Segment:
        made = Segment(name, length, descriptor=descriptor)
        self._stack.callback(made.close)
        return made

    def process(
        self, script: str, told: dict[str, object], failpoints: str = "", fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "support" / script), json.dumps(told)]
        environment = {**os.environ, "RELIGHT_FAILPOINTS": failpoints, "PYTHONPATH": str(ROOT)}
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=fds)

        def end() -> None:
            made.kill()
            made.wait(10)
            if made.stdout is not None:
                made.stdout.close()

        self._stack.callback(end)
        return made

    def holder(self, name: str, failpoints: str = "", **told: object) -> tuple[Holder, str, str]:
        """A source in a process of its own, its address and a grant for it."""
        process = self.process("holder.py", {"name": name, "bytes": BODY, **told}, failpoints)
        assert process.stdout is not None
        offer = json.loads(process.stdout.readline())
        grant = grants.mint(offer["key"], grants.Claims(name, 1, "", "i-receiver", CLOCK.now() + 300))
        return self.at(name, offer["address"], grant), offer["address"], grant

    def at(self, name: str, address: str, grant: str) -> Holder:
        return Holder(name, lambda: TcpReader(address, grant, name, 5.0))

    def refill(self, segment: Segment, *holders: Holder, **options: object) -> Received:
        wanted = Wanted(LAYOUT, {t.name: t for t in table(BODY)}, "r1")
        return refill(segment, wanted, holders, streams=1, clock=CLOCK, options=Options(**options))

    def right(self, segment: Segment) -> bool:
        return segment.view[:BODY] == self._expected.view[:BODY]


@pytest.fixture
def field() -> Iterator[Field]:
    with ExitStack() as stack:
        yield Field(stack)


def test_a_source_killed_at_any_chunk_costs_a_reason_and_no_byte(field: Field) -> None:
    random.seed(20)
    steady, *_ = field.holder("steady")
    target = field.segment("t")
    everything = tuple(range(field.count))
    mine, theirs = everything[::2], everything[1::2]
    for n in range(KILLS):
        at = random.randint(1, len(mine))
        with ExitStack() as stack:
            other = Field(stack)
            dying, *_ = other.holder("dying", f"transfer.source.serve={at}*exit")
            target.drop()
            got = field.refill(target, replace(dying, queue=mine), replace(steady, queue=theirs), planned_seconds=60.0)
        assert field.right(target), f"kill {n} at read {at}"
        assert got.bytes == BODY
        assert "dying" in got.lost["dying"]


def test_the_only_source_killed_leaves_a_dirty_model_with_the_source_at_fault(field: Field) -> None:
    only, *_ = field.holder("only", "transfer.source.serve=3*exit")
    with pytest.raises(ModelDirty, match="only: connection lost") as caught:
        field.refill(field.segment("t"), replace(only, queue=(0, 2, 4, 6, 8, 10)))
    assert isinstance(caught.value.cause, RemoteFault)


def test_a_source_that_stops_answering_is_left_for_another(field: Field) -> None:
    steady, *_ = field.holder("steady")
    frozen, *_ = field.holder("frozen", "transfer.source.serve=2*stop")
    target = field.segment("t")
    got = field.refill(target, replace(frozen, queue=(0, 2, 4)), steady, planned_seconds=60.0)
    assert field.right(target)
    assert "frozen" in got.lost["frozen"]


def test_a_source_that_crawls_brings_less_or_is_left_and_holds_nobody_up(field: Field) -> None:
    steady, *_ = field.holder("steady")
    crawling, *_ = field.holder("crawling", pace=2e6)
    target = field.segment("t")
    got = field.refill(target, steady, crawling)
    assert field.right(target)
    assert got.holders["crawling"] < got.holders["steady"]


def test_a_receiver_that_was_killed_goes_on_where_it_was(field: Field) -> None:
    _, address, grant = field.holder("a")
    target = field.segment("t")
    told = {"fd": target.fd, "bytes": BODY, "address": address, "grant": grant}
    killed = field.process("receiver.py", {**told, "look_first": False}, "transfer.receive=2*exit", (target.fd,))
    assert killed.wait(30) != 0
    again = field.process("receiver.py", {**told, "look_first": True}, "", (target.fd,))
    output, _ = again.communicate(timeout=30)
    brought = json.loads(output)["bytes"]
    assert 0 < brought < BODY
    assert field.right(target)


@pytest.mark.parametrize("after", [0, 1, 5_000_000])
def test_a_stream_that_is_cut_is_never_taken_for_whole(field: Field, after: int) -> None:
    _, address, grant = field.holder("a")
    host, port = address.removeprefix("tcp:").split(":")
    with socket.create_server(("127.0.0.1", 0)) as cutting:

        def carry(a: socket.socket, b: socket.socket, most: int | None) -> None:
            sent = 0
            while data := a.recv(1 << 16):
                data = data if most is None else data[: most - sent]
                b.sendall(data)
                sent += len(data)
                if most is not None and sent >= most:
                    break
            for end in (a, b):
                end.shutdown(socket.SHUT_RDWR)

        def between() -> None:
            one, other = cutting.accept()[0], socket.create_connection((host, int(port)))
            with closing(one), closing(other):
                up = threading.Thread(target=_quietly(carry), args=(one, other, None), daemon=True)
                up.start()
                _quietly(carry)(other, one, after)
                up.join(10)

        thread = threading.Thread(target=between, daemon=True)
        thread.start()
        target = field.segment("t")
        with pytest.raises((RemoteFault, ModelDirty), match="a: "):
            field.refill(target, field.at("a", f"tcp:127.0.0.1:{cutting.getsockname()[1]}", grant))
        thread.join(10)


def _quietly(call):
    def run(*arguments: object) -> None:
        try:
            call(*arguments)
        except OSError:
            return

    return run


def test_a_grant_of_another_source_opens_nothing(field: Field) -> None:
    _, address, _ = field.holder("a")
    foreign = grants.mint("00" * 32, grants.Claims("a", 1, "", "i-receiver", CLOCK.now() + 60))
    with pytest.raises(RemoteFault, match="not signed for this source"):
        field.refill(field.segment("t"), field.at("a", address, foreign))


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_receiver_without_room_says_so_and_blames_no_source(field: Field, tmp_path: Path) -> None:
    steady, *_ = field.holder("steady")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={BODY // 2}", "none", str(tmp_path)], check=True, timeout=10)
    try:
        descriptor = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, BODY)
        small = field.segment("small", BODY, descriptor)
        with pytest.raises((LocalFault, ModelDirty), match=r"page|space") as caught:
            field.refill(small, steady)
        cause = caught.value.cause if isinstance(caught.value, ModelDirty) else caught.value
        assert isinstance(cause, LocalFault)
        small.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=10)


def test_sixty_four_receivers_at_once_all_get_every_byte(field: Field) -> None:
    steady, *_ = field.holder("steady")
    wrong: list[str] = []

    def one(n: int) -> None:
        target = Segment(f"t{n}", BODY)
        try:
            field.refill(target, steady)
            if not field.right(target):
                wrong.append(f"{n}: other bytes")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
            wrong.append(f"{n}: {error!r}")
        finally:
            target.close()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(RECEIVERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_no_process_survives_its_test(field: Field) -> None:
    process = field.process("holder.py", {"name": "a", "bytes": BODY})
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
