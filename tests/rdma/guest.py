"""Inside a virtual machine with soft-RoCE: `source` serves a body and obeys, `receiver` goes through the steps.

Cards rxe0 and rxe1 sit on eth0 and eth1; eth2 is plain, and carries TCP and what the two say to each other. Each
finding is a line of JSON behind MARK; tests/rdma/run.py judges.
"""

from __future__ import annotations

import fcntl
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # where the plugin lies, too

from relight.agent.rails import Rails, look
from relight.core.clock import SystemClock
from relight.core.errors import RelightError, TransferError
from relight.core.fingerprint import Fingerprint
from relight.core.records import Deal, RungKind, SourceRef
from relight.plugin import doors, settings
from relight.plugin.orders import ModelMemory, Order
from relight.plugin.pages import HostPages
from relight.plugin.residency import Residency
from relight.transfer import grants, stream
from relight.transfer.chunks import cut
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.segment import Segment
from relight.transfer.session import Holder, Options, Progress, Wanted, refill
from relight.transfer.source import Source
from relight.transfer.transports.preflight import UNLIMITED, Need, findings
from relight.transfer.transports.rdma import Landing, RdmaListener, RdmaReader
from relight.transfer.transports.tcp import TcpListener, TcpReader
from relight.transfer.transports.verbs import Region
from relight.transfer.verify import blocks_of

MARK = "FOUND "
BODY = 64 << 20
TENSOR = 4 << 20
LAYOUT = {"engine": "rdma-test"}
CARDS = ("rxe0", "rxe1")
INTERFACES = ("eth0", "eth1", "eth2")
HOSTS = {"source": 1, "receiver": 2}
CONTROL_PORT = 7000
LOST_SECONDS = 7.0
"""An emulated peer may be silent for so long; a real one is lost sooner (transports/verbs.py)."""
DEADLINE = 30.0
PATIENCE = 60.0
"""An emulated card pauses for longer than another one takes: lateness says nothing here, verbs tell what failed."""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
CLOCK = SystemClock()


def address(interface: int, role: str) -> str:
    return f"10.77.{interface}.{HOSTS[role]}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


def bring_up(role: str) -> None:
    ip("link", "set", "lo", "up")
    for number, interface in enumerate(INTERFACES):
        ip("link", "set", interface, "mtu", "9000")
        ip("address", "add", f"{address(number, role)}/24", "dev", interface)
        ip("link", "set", interface, "up")
    for card, interface in zip(CARDS, INTERFACES, strict=False):
        subprocess.run(["rdma", "link", "add", card, "type", "rxe", "netdev", interface], check=True, timeout=30)


def take_down(interface: str) -> None:
    """By the kernel's own call: starting a program takes so long here that the transfer might be over."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", interface.encode(), 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", interface.encode(), flags & ~IFF_UP))


def table(view: memoryview | None = None) -> tuple[TensorEntry, ...]:
    """The body's tensors, with digests when there is something to hash."""
    return tuple(
        TensorEntry(
            f"t{at // TENSOR}", "uint8", (TENSOR,), (1,), at, TENSOR, (),
            blocks_of(view[at : at + TENSOR]) if view is not None else b"",
        )
        for at in range(0, BODY, TENSOR)
    )  # fmt: skip


def digest(segment: Segment) -> str:
    return xxhash.xxh3_128_hexdigest(segment.view)


def in_the_way() -> list[str]:
    return [str(f) for card in CARDS for f in findings(card, Need(BODY, UNLIMITED))]


def found(step: str, **what: object) -> None:
    print(MARK + json.dumps({"step": step, "at": round(time.monotonic(), 1), **what}), flush=True)


def rails() -> Rails:
    return look(None, BODY)


class PatientListener(RdmaListener):
    """With the silence that emulation needs."""

    def __init__(self, device: str, host: str, landing: Landing | None = None) -> None:
        super().__init__(device, host, 0, LOST_SECONDS, landing)


def a_member(instance: str, role: str, segment: Segment) -> Residency:
    """The part of Relight inside an engine, over `segment`, with nothing around it but a table of tensors."""

    def describe(revision: str) -> WeightManifest:
        return WeightManifest(Fingerprint(LAYOUT, {"revision": revision}, {}), 0, BODY, table(segment.view))

    directory = Path(tempfile.mkdtemp(prefix="relight-"))
    memory = ModelMemory(
        HostPages(instance, segment, lambda: None, CLOCK), {t.name: t for t in table()}, LAYOUT, describe,
        lambda path: None, lambda scalars: None, lambda: None,
    )  # fmt: skip
    environ = {
        "RELIGHT_INSTANCE": instance, "RELIGHT_ENGINE_DIR": str(directory), "RELIGHT_BIND_HOST": address(2, role),
        "RELIGHT_CONTENT_REVISION": "r1", "RELIGHT_RDMA": ",".join(rails().cards),
    }  # fmt: skip
    return Residency(settings.read(environ), 0, memory, CLOCK)


class SourceGuest:
    """Serves one body on both cards and over TCP; each `serve` is a generation of its own."""

    def __init__(self) -> None:
        self._segment = Segment("source", BODY)
        self._generation = 0
        self._listeners: list[RdmaListener | TcpListener] = []
        self._source: Source | None = None

    def serve(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Content comes into memory, the memory is registered, readers are admitted."""
        self._segment.populate(0, BODY)
        block = random.Random(7).randbytes(TENSOR)
        for at in range(0, BODY, TENSOR):
            self._segment.view[at : at + TENSOR] = block
            self._segment.view[at : at + 8] = at.to_bytes(8, "little")
        manifest = WeightManifest(Fingerprint(LAYOUT, {"revision": "r1"}, {}), 0, BODY, table(self._segment.view))
        self._source = source = Source("i-source", self._segment, manifest, CLOCK)
        self._listeners = [
            *(RdmaListener(c, address(n, "source"), 0, LOST_SECONDS) for n, c in enumerate(CARDS)),
            TcpListener(address(2, "source")),
        ]
        addresses = [listener.register(source) for listener in self._listeners]
        self._generation += 1
        source.open(self._generation, key := grants.new_key())
        claims = grants.Claims("i-source", self._generation, "", "i-receiver", CLOCK.now() + 3600)
        return {"addresses": addresses, "grant": grants.mint(key, claims), "digest": digest(self._segment)}

    def member(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Serves as the part of Relight inside an engine does, with what the agent's look at the cards gave it."""
        self._member = member = a_member("i-source", "source", self._segment)
        opened = member.open_source(key := grants.new_key())
        claims = grants.Claims("i-source", int(str(opened["generation"])), "", "i-receiver", CLOCK.now() + 3600)
        self._offered = SourceRef(
            "i-source",
            "a",
            1,
            "",
            "",
            dict(opened["addresses"])["rdma"],
            grants.mint(key, claims),  # type: ignore[call-overload]
        )
        return {**opened, "grant": self._offered.grant, "digest": digest(self._segment)}

    def back(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Another member here is filled by the receiver's relay alone; the source only says what there is."""
        segment, parts = Segment("back", BODY), len(cut(table()))
        segment.populate(0, BODY)
        member = a_member("i-back", "source", segment)
        member.sleep(2)
        relay = SourceRef(
            "i-receiver", "b", 1, "", "", told["addresses"]["rdma"], told["grant"], filling=True,
            parts=tuple(range(parts)),
        )  # fmt: skip
        deal = Deal("chain", "a test", 1e6, 2, 1, parts)
        order = Order(RungKind.PEER_RDMA, "r1", (self._offered, relay), deal=deal)
        got = member.refill(order, lambda progress: None)
        return {"brought": dict(got.brought), "digest": digest(segment), "detail": got.detail}

    def sleep(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """As an engine that goes to sleep: no readers, no registration, no pages."""
        assert self._source is not None
        cut_readers = self._source.close(5.0)
        for listener in self._listeners:
            listener.release()
        self._segment.drop()
        return {"cut": cut_readers, "resident": self._segment.resident_bytes()}

    def down(self, told: Mapping[str, Any]) -> dict[str, Any]:
        take_down(INTERFACES[told["card"]])
        return {}

    def look(self, told: Mapping[str, Any]) -> dict[str, Any]:
        return {"findings": in_the_way()}

    def run(self) -> None:
        does: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "serve": self.serve, "sleep": self.sleep, "member": self.member, "back": self.back,
            "down": self.down, "look": self.look,
        }  # fmt: skip
        with socket.create_server((address(2, "source"), CONTROL_PORT)) as server:
            found("listening")
            sock, _ = server.accept()
        with sock, sock.makefile("rw") as lines:
            for line in lines:
                told = json.loads(line)
                try:
                    answer = does[told["do"]](told)
                except Exception as error:  # noqa: BLE001 - the receiver has to hear of it
                    answer = {"error": f"{type(error).__name__}: {error}"}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


class ReceiverGuest:
    """Goes through the steps, one after the other."""

    def __init__(self) -> None:
        self._segment = Segment("target", BODY)
        self._wanted = Wanted(LAYOUT, {t.name: t for t in table()}, "r1")
        self._half = len(cut(table())) // 2
        self._offer: dict[str, Any] = {}
        self._readers: dict[str, list[RdmaReader]] = {c: [] for c in CARDS}
        for _ in range(120):
            try:
                self._control = socket.create_connection((address(2, "source"), CONTROL_PORT), timeout=2)
                break
            except OSError:
                time.sleep(0.5)  # the other machine is still booting, and tells nobody
        else:
            raise RuntimeError("the source's machine did not come up")
        self._control.settimeout(60)
        self._lines = self._control.makefile("rw")

    def say(self, **what: object) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        if "error" in answer:
            raise RuntimeError(f"source: {answer['error']}")
        return answer

    def tell(self, **what: object) -> dict[str, Any]:
        self.say(**what)
        return self.hear()

    def reader(self, card: int, landing: Landing | None = None, offer: Mapping[str, Any] | None = None) -> RdmaReader:
        given, name = offer or self._offer, CARDS[card]
        landing = landing or Landing(name, self._segment, LOST_SECONDS)
        reader = RdmaReader(given["addresses"][card], given["grant"], f"i-source by {name}", DEADLINE, landing)
        self._readers[name].append(reader)
        return reader

    def holder(self, card: int) -> Holder:
        """One half of the chunks by one card."""
        queue = tuple(range(self._half) if card == 0 else range(self._half, 2 * self._half))
        return Holder(f"i-source by {CARDS[card]}", lambda: self.reader(card), queue=queue)

    def tcp(self) -> Holder:
        address = self._offer["addresses"][2]
        connect = lambda: TcpReader(address, self._offer["grant"], "i-source by tcp", DEADLINE)  # noqa: E731
        return Holder("i-source by tcp", connect, reserve=True)

    def session(
        self, step: str, holders: list[Holder], on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> None:
        """One refill into memory without a page; what it brought, by whom, and what the cards counted."""
        self._segment.drop()
        self._readers = {c: [] for c in CARDS}
        before, begun = counters(), time.monotonic()
        # Nobody helps out before a holder is lost: who brings more than its half has taken over.
        options = Options(planned_seconds=1e6, on_progress=on_progress)
        got = refill(self._segment, self._wanted, holders, streams=1, clock=CLOCK, options=options)
        after = counters()
        found(
            step, bytes=got.bytes, seconds=round(time.monotonic() - begun, 2), holders=dict(got.holders),
            lost=dict(got.lost), same=digest(self._segment) == self._offer["digest"],
            completed={c: sum(r.completed for r in self._readers[c]) for c in CARDS},
            counters={c: {k: after[c][k] - before[c][k] for k in after[c]} for c in CARDS},
        )  # fmt: skip

    # ------------------------------------------------------------------ the steps

    def member(self) -> None:
        """A sleeper of an engine wakes by the cards that its agent found, from a member that serves by its own."""
        self.tell(do="serve")
        offer = self.tell(do="member")
        segment = Segment("member", BODY)
        segment.populate(0, BODY)
        member = a_member("i-receiver", "receiver", segment)
        member.sleep(2)
        relay = member.open_relay(key := grants.new_key())
        claims = grants.Claims("i-receiver", 1, "", "i-back", CLOCK.now() + 3600)
        before = counters()
        peer = SourceRef("i-source", "a", 1, "", "", offer["addresses"].get("rdma", ""), offer["grant"])
        said = member.refill(Order(RungKind.PEER_RDMA, "r1", (peer,)), lambda progress: None)
        member.resume()
        after = counters()
        found(
            "member", bytes=said.bytes, detail=said.detail, same=digest(segment) == offer["digest"],
            addresses=offer["addresses"], closed=offer["closed"], cards=list(rails().cards),
            counters={c: {k: after[c][k] - before[c][k] for k in after[c]} for c in CARDS},
        )  # fmt: skip
        passed = self.tell(do="back", addresses=relay["addresses"], grant=grants.mint(key, claims))
        found("relay", brought=passed["brought"], detail=passed["detail"], same=passed["digest"] == offer["digest"])
        member.close_source(1.0)

    def both(self, step: str) -> None:
        self._offer = self.tell(do="serve")
        self.session(step, [self.holder(0), self.holder(1)])

    def region(self) -> Region:
        """The source's memory as card 0 is told of it."""
        reader = self.reader(0)
        try:
            return reader._regions[0]
        finally:
            reader.close()

    def renewed(self) -> None:
        old_offer, old = self._offer, self.region()
        asleep = self.tell(do="sleep")
        self.both("renewed")
        new = self.region()
        refused = ""
        try:
            self.reader(0, offer={**self._offer, "grant": old_offer["grant"]}).close()
        except RelightError as error:
            refused = str(error)
        found(
            "stale", refused=refused, keys=[old.rkey, new.rkey], asleep=asleep, old_key=self.with_key(old.rkey),
        )  # fmt: skip

    def with_key(self, rkey: int) -> dict[str, Any]:
        """Reads with another key than the source told; what is said of it, and whether anything came."""
        self._segment.drop()

        def connect() -> RdmaReader:
            reader = self.reader(0)
            reader._regions = [replace(region, rkey=rkey) for region in reader._regions]
            return reader

        self._readers = {c: [] for c in CARDS}
        why = ""
        try:
            refill(self._segment, self._wanted, [Holder("i-source by rxe0", connect)], streams=1, clock=CLOCK)
        except TransferError as error:
            why = f"{type(error).__name__}: {error}"
        return {
            "why": why,
            "completed": sum(r.completed for r in self._readers[CARDS[0]]),
            "untouched": not any(self._segment.view[at] for at in range(0, BODY, 4096)),
        }

    def wrong_key(self) -> None:
        found("wrong-key", **self.with_key(self.region().rkey ^ 0x5A))

    def failover(self) -> None:
        """Link 0 goes down in mid-transfer, then, once card 1 has brought more than its half, link 1."""
        half = self._half * (BODY // (2 * self._half))
        downs: list[dict[str, int]] = []

        def watch(progress: Progress) -> None:
            mine = [progress.holders[f"i-source by {c}"] for c in CARDS]
            if (not downs and 0 < mine[0] < half) or (len(downs) == 1 and mine[1] > half):
                # Not waited for: reads go on while the link goes down.
                self.say(do="down", card=len(downs))
                downs.append(dict(progress.holders))

        before = self.tell(do="look")["findings"]
        self.session("failover", [self.holder(0), self.holder(1), self.tcp()], watch)
        for _ in downs:
            self.hear()
        found("downs", downs=downs, findings=[before, self.tell(do="look")["findings"]])

    def run(self) -> None:
        self.both("both")
        self.member()
        self.renewed()
        self.wrong_key()
        self.failover()
        found("end")


def counters() -> dict[str, dict[str, int]]:
    """By card: packets that it received by RDMA, and bytes that its interface received."""
    read = {}
    for card, interface in zip(CARDS, INTERFACES, strict=False):
        packets = Path("/sys/class/infiniband", card, "ports/1/hw_counters/rcvd_pkts")
        received = Path("/sys/class/net", interface, "statistics/rx_bytes")
        read[card] = {"packets": int(packets.read_text()), "interface_bytes": int(received.read_text())}
    return read


def main() -> None:
    role = sys.argv[1]
    stream.LEAST_PATIENCE = PATIENCE
    doors.RdmaListener, doors.READ_DEADLINE = PatientListener, DEADLINE
    doors.Landing = partial(Landing, lost_seconds=LOST_SECONDS)
    bring_up(role)
    found("up", role=role)
    if role == "source":
        SourceGuest().run()
    else:
        ReceiverGuest().run()


if __name__ == "__main__":
    main()
