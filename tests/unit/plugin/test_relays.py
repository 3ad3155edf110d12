"""Members that are filled at the same time and pass on what they have proven: when, to whom, and until when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relight.core.clock import SystemClock
from relight.core.errors import Conflict, LocalFault, RemoteFault
from relight.core.records import Deal, RungKind, SourceRef
from relight.plugin.orders import Order, Restored
from relight.transfer import grants
from relight.transfer.chunks import cut
from relight.transfer.transports import rdma
from relight.transfer.transports.tcp import TcpReader
from support.weights import Engine
from tests.unit.transfer.fake_verbs import FakeDevice

DEADLINE = 30.0


class Several:
    """A source and some sleepers, each of which offers to pass on."""

    def __init__(self, root: Path, count: int, cards: int = 0) -> None:
        self.source = Engine("i-a", root / "a", cards=cards)
        self.addresses, self.grant = self.source.offers()
        self.sleepers = [Engine(f"i-{n}", root / str(n), cards=cards) for n in range(count)]
        for sleeper in self.sleepers:
            sleeper.residency.sleep(2)
        self.relays = [sleeper.stand_by() for sleeper in self.sleepers]
        self.parts = len(cut(self.source.residency.source.manifest.tensors))

    def order(self, turn: int, kind: RungKind, near: str = "") -> Order:
        """Part n comes from the source to number n modulo all, and from there to the others."""
        count = len(self.sleepers)
        by = [tuple(range(n, self.parts, count)) for n in range(count)]
        refs = [SourceRef("i-a", "a", 1, "", "", self.addresses[kind.transport], self.grant, parts=by[turn])]
        for n, (addresses, grant) in enumerate(self.relays):
            if n != turn:
                address = addresses[near or kind.transport]
                refs.append(SourceRef(f"i-{n}", "s", 1, "", "", address, grant, filling=True, parts=by[n]))
        return Order(kind, "r1", tuple(refs), deal=Deal("swarm", "a test", 60.0, count, turn, self.parts))

    def plain(self, turn: int) -> Order:
        """All of it from the source."""
        order = self.order(turn, RungKind.PEER_TCP)
        return replace(order, deal=None, sources=(replace(order.sources[0], parts=()),))

    def fill(self, *orders: Order) -> list[Restored]:
        """All at the same time."""
        got: dict[int, Restored] = {}

        def one(turn: int) -> None:
            got[turn] = self.sleepers[turn].residency.refill(orders[turn], lambda progress: None)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(orders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert len(got) == len(orders)
        return [got[n] for n in range(len(orders))]

    def close(self) -> None:
        for engine in (self.source, *self.sleepers):
            engine.residency.close_source(0.0)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Several]:
    made = Several(tmp_path, 3)
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "near"), [("peer_tcp", ""), ("peer_tcp", "shm"), ("peer_shm", "")])
def test_sleepers_filled_at_once_take_each_byte_from_the_source_once(three: Several, kind: str, near: str) -> None:
    got = three.fill(*(three.order(n, RungKind(kind), near) for n in range(3)))
    whole = three.source.residency.source.manifest.weight_bytes
    assert sum(g.brought["i-a"] for g in got) == whole
    for sleeper, restored in zip(three.sleepers, got, strict=True):
        assert sum(restored.brought.values()) == whole
        sleeper.residency.resume()
        assert sleeper.segment.view == three.source.segment.view


def test_cards_pass_on_out_of_the_memory_that_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "Device", FakeDevice)
    made = Several(tmp_path, 2, cards=2)
    got = made.fill(*(made.order(n, RungKind.PEER_RDMA) for n in range(2)))
    whole = made.source.residency.source.manifest.weight_bytes
    assert sum(g.brought["i-a"] for g in got) == whole
    assert [g.brought[f"i-{1 - n}"] for n, g in enumerate(got)] == [got[1].brought["i-a"], got[0].brought["i-a"]]
    for sleeper in made.sleepers:
        sleeper.residency.resume()
        assert sleeper.segment.view == made.source.segment.view
    made.close()


def test_a_neighbour_that_never_comes_is_not_needed(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.05)
    got = three.fill(three.order(0, RungKind.PEER_TCP), three.order(1, RungKind.PEER_TCP))
    assert all("i-2" not in g.brought for g in got)
    assert "i-2 does not know yet what it receives" in got[0].detail
    assert three.sleepers[0].segment.view == three.source.segment.view


def test_being_late_is_not_held_against_it(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.05)
    receiver = three.sleepers[0].residency
    for _ in range(3):
        receiver.refill(three.order(0, RungKind.PEER_TCP), lambda progress: None)
        receiver.suspend()
    assert not receiver._breaker.rests("i-1")


def test_a_neighbours_word_alone_is_never_what_is_read(three: Several) -> None:
    lying = three.order(0, RungKind.PEER_TCP)
    three.source.residency.close_source(0.0)
    with pytest.raises(RemoteFault, match=r"i-a at .* cannot connect"):
        three.sleepers[0].residency.refill(lying, lambda progress: None)


def test_a_sleeper_gives_nothing_before_it_is_filled_and_nothing_without_a_grant(
    three: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.05)
    addresses, grant = three.relays[0]
    reader = TcpReader(addresses["tcp"], grant, "i-0", 5.0)
    with pytest.raises(RemoteFault, match="does not know yet what it receives"):
        reader.describe()
    reader.close()
    with pytest.raises(RemoteFault, match="not signed for this source"):
        TcpReader(addresses["tcp"], three.grant, "i-0", 5.0)


def test_whoever_still_reads_goes_on_after_the_wake_until_the_next_sleep(three: Several) -> None:
    first, addresses, grant = three.sleepers[0].residency, *three.relays[0]
    three.fill(three.plain(0))
    first.resume()
    first.open_source(grants.new_key())
    late = three.sleepers[1].residency
    peer = SourceRef("i-0", "s", 1, "", "", addresses["tcp"], grant)
    late.refill(Order(RungKind.PEER_TCP, "r1", (peer,)), lambda progress: None)
    assert three.sleepers[1].segment.view == three.source.segment.view
    reader = TcpReader(addresses["tcp"], grant, "i-0", 5.0)
    with pytest.raises(Conflict, match="still has readers"):
        first.sleep(2)
    assert first.close_source(0.0) == 1
    reader.close()
    first.sleep(2)
    assert three.sleepers[0].segment.resident_bytes() == 0
    three.sleepers[0].stand_by()
    with pytest.raises(RemoteFault):
        TcpReader(addresses["tcp"], grant, "i-0", 5.0)


@pytest.mark.parametrize("end", ["suspend", "disk"])
def test_what_is_given_up_or_written_over_is_passed_on_no_more(three: Several, end: str) -> None:
    first, (addresses, grant) = three.sleepers[0], three.relays[0]
    three.fill(three.plain(0))
    reader = TcpReader(addresses["tcp"], grant, "i-0", 5.0)
    reader.describe()
    if end == "suspend":
        first.residency.suspend()
    else:
        first.wake(RungKind.DISK)
    with pytest.raises(RemoteFault):
        reader.finish()
    reader.close()
    with pytest.raises(RemoteFault):
        TcpReader(addresses["tcp"], grant, "i-0", 5.0)


def test_an_awake_member_is_not_filled(three: Several) -> None:
    with pytest.raises(Conflict, match="awake is not filled"):
        three.source.residency.open_relay(grants.new_key())


def test_a_neighbour_that_lies_is_found_out_and_the_source_brings_it(three: Several) -> None:
    first = three.sleepers[0]
    three.fill(three.plain(0))
    first.segment.view[: 1 << 20] = bytes(1 << 20)
    order = three.order(1, RungKind.PEER_TCP)
    # All that is dealt to it is asked of it, and it has everything by its own word.
    two = replace(order, sources=(order.sources[0], replace(order.sources[1], parts=tuple(range(three.parts)))))
    two = replace(two, sources=(replace(two.sources[0], parts=()), two.sources[1]))
    got = three.sleepers[1].residency.refill(two, lambda progress: None)
    assert "from i-0: digest" in got.detail
    assert three.sleepers[1].segment.view == three.source.segment.view


def test_a_deal_of_parts_that_do_not_exist_changes_nothing(three: Several) -> None:
    order = three.order(0, RungKind.PEER_TCP)
    wrong = replace(order, sources=(replace(order.sources[0], parts=(three.parts,)),))
    with pytest.raises(LocalFault, match=f"part {three.parts} of {three.parts} does not exist"):
        three.sleepers[0].residency.refill(wrong, lambda progress: None)
    assert three.sleepers[0].segment.resident_bytes() == 0


def test_a_clock_is_all_that_ends_a_grant(three: Several) -> None:
    key = grants.new_key()
    opened = three.sleepers[0].residency.open_relay(key)
    assert opened["generation"] == 2
    claims = grants.Claims("i-0", 2, "", "i-1", SystemClock().now() - 1)
    addresses = opened["addresses"]
    assert isinstance(addresses, dict)
    with pytest.raises(RemoteFault, match="expired"):
        TcpReader(addresses["tcp"], grants.mint(key, claims), "i-0", 5.0)
