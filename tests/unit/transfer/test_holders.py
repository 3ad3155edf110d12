"""A refill from several holders: one dies, lies, is slow, or is itself still receiving."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from relight.core.clock import SystemClock, VirtualClock
from relight.core.errors import InvalidInput, LocalFault, ModelDirty, RemoteFault
from relight.transfer import grants
from relight.transfer.board import PATIENCE, Bitmap, Board
from relight.transfer.breaker import FAILURES, REST_SECONDS, Breaker
from relight.transfer.chunks import cut
from relight.transfer.manifest import WeightManifest
from relight.transfer.pace import Pace
from relight.transfer.request import Cancel, Holder, Options, Progress, Received, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.source import Source
from relight.transfer.transports.base import Reader
from relight.transfer.transports.shm import ShmListener, ShmReader
from relight.transfer.transports.tcp import TcpListener, TcpReader
from tests.unit.transfer.conftest import LAYOUT, SIZES, make_manifest

CLOCK = SystemClock()


@dataclass
class Ends:
    """Sources and receivers of one content, each with its own segment, over real sockets."""

    stack: ExitStack
    first: WeightManifest = field(init=False)

    def segment(self, name: str) -> Segment:
        made = Segment(name, sum(SIZES) + 256 * len(SIZES))
        self.stack.callback(made.close)
        return made

    def source(self, name: str, revision: str = "r1", pace: Pace | None = None) -> tuple[Source, Holder]:
        """An open source with everything."""
        segment = self.segment(name)
        segment.populate(0, segment.bytes)
        self.first = make_manifest(segment, revision=revision)
        return self.opened(Source(name, segment, self.first, CLOCK, pace))

    def relay(self, name: str, segment: Segment, deadline: float = 5.0) -> tuple[Source, Holder]:
        """A source of what will arrive in `segment`."""
        source, holder = self.opened(Source(name, segment, None, CLOCK), deadline)
        return source, replace(holder, partial=True)

    def opened(self, source: Source, deadline: float = 5.0) -> tuple[Source, Holder]:
        source.open(1, key := grants.new_key())
        listener = TcpListener("127.0.0.1")
        address = listener.register(source)
        self.stack.callback(listener.release)
        grant = grants.mint(key, grants.Claims(source.instance, 1, "", "i-receiver", CLOCK.now() + 60))
        return source, Holder(source.instance, lambda: TcpReader(address, grant, source.instance, deadline))

    def receive(self, segment: Segment, *holders: Holder, **options: object) -> Received:
        wanted = Wanted(LAYOUT, {t.name: t for t in self.first.tensors}, "r1")
        return refill(segment, wanted, holders, streams=1, clock=CLOCK, options=Options(**options))

    def same(self, one: Segment, other: Segment) -> bool:
        return all(
            one.view[t.offset : t.offset + t.bytes] == other.view[t.offset : t.offset + t.bytes]
            for t in self.first.tensors
        )


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


def test_two_holders_share_the_work_as_the_plan_deals_it(ends: Ends) -> None:
    (a, one), (_, two) = ends.source("a"), ends.source("b")
    count = len(cut(ends.first.tensors))
    target = ends.segment("t")
    queues = tuple(range(0, count, 2)), tuple(range(1, count, 2))
    got = ends.receive(target, replace(one, queue=queues[0]), replace(two, queue=queues[1]), planned_seconds=60.0)
    assert ends.same(target, a.segment)
    sizes = [c.bytes for c in cut(ends.first.tensors)]
    assert got.holders == {"a": sum(sizes[n] for n in queues[0]), "b": sum(sizes[n] for n in queues[1])}
    assert not got.lost


def test_a_holder_that_lies_is_left_and_another_brings_the_chunk(ends: Ends) -> None:
    (a, good), (b, liar) = ends.source("a"), ends.source("b")
    for tensor in ends.first.tensors:
        b.segment.view[tensor.offset] ^= 1
    target = ends.segment("t")
    count = len(cut(ends.first.tensors))
    got = ends.receive(target, replace(liar, queue=tuple(range(count))), good, planned_seconds=60.0)
    assert ends.same(target, a.segment)
    assert got.holders["a"] == ends.first.weight_bytes
    assert "from b: digest" in got.lost["b"]


def test_a_holder_of_other_content_takes_no_part(ends: Ends) -> None:
    (a, good), (b, other) = ends.source("a"), ends.source("b")
    changed = replace(b.manifest.tensors[0], blocks=b"\1" * len(b.manifest.tensors[0].blocks))
    b._put(replace(b.manifest, tensors=(changed, *b.manifest.tensors[1:])))
    target, begun = ends.segment("t"), threading.Event()
    count = len(cut(ends.first.tensors))

    def later() -> Reader:
        # Who describes first says what is read: the other one comes when that is settled.
        assert begun.wait(30)
        return other.connect()

    got = ends.receive(
        target, replace(good, queue=tuple(range(count - 1))), replace(other, connect=later, queue=(count - 1,)),
        planned_seconds=60.0, on_progress=lambda progress: begun.set(),
    )  # fmt: skip
    assert ends.same(target, a.segment)
    assert "holds other content: t0" in got.lost["b"]
    assert got.holders["b"] == 0


def test_a_cancelled_refill_does_not_wait_out_a_source_that_is_silent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 600.0)
    _, origin = ends.source("a")
    relay, holder = ends.relay("m", ends.segment("m"), deadline=600.0)
    chunks = cut(ends.first.tensors)
    relay.relay(ends.first, chunks, Bitmap(len(chunks)))
    cancel, waits, ended = Cancel(), threading.Event(), threading.Event()

    def connect() -> Reader:
        reader = holder.connect()
        following = reader.next

        def watched(count: int) -> tuple[int, memoryview]:
            waits.set()
            return following(count)

        reader.next = watched
        return reader

    def receive() -> None:
        silent = replace(holder, connect=connect, queue=(0,))
        with pytest.raises((ModelDirty, LocalFault), match="cancelled"):
            ends.receive(ends.segment("t"), origin, silent, cancel=cancel, planned_seconds=600.0)
        ended.set()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    assert waits.wait(30)
    cancel.set()
    assert ended.wait(30)
    relay.close(0.0)


def test_holders_that_die_in_turn_leave_a_model_that_is_dirty_and_every_reason(ends: Ends) -> None:
    (a, one), (b, two) = ends.source("a"), ends.source("b")
    target = ends.segment("t")

    def close(progress: object) -> None:
        a.close(0.0)
        b.close(0.0)

    with pytest.raises(ModelDirty, match="no holder is left") as caught:
        ends.receive(target, one, two, on_progress=close)
    assert isinstance(caught.value.cause, RemoteFault)
    # Whether a source had this reader yet or not, it says why it will not serve it.
    for name in "ab":
        assert re.search(f"{name} (cut this reader|is no source now)", str(caught.value))


def test_a_holder_that_dies_leaves_its_chunks_to_the_other(ends: Ends) -> None:
    (a, one), (b, two) = ends.source("a"), ends.source("b")
    target = ends.segment("t")
    count = len(cut(ends.first.tensors))
    got = ends.receive(
        target, replace(one, queue=tuple(range(count))), two, planned_seconds=60.0,
        on_progress=lambda progress: a.close(0.0),
    )  # fmt: skip
    assert ends.same(target, b.segment)
    assert got.holders["a"] > 0
    assert got.holders["b"] > 0
    assert "cut this reader" in got.lost["a"]


def test_a_way_that_is_closed_on_this_side_is_left_for_another_and_blames_no_source(ends: Ends) -> None:
    (_, one), (b, two) = ends.source("a"), ends.source("b")

    def no_card() -> TcpReader:
        raise LocalFault("the card is down")

    breaker, target = Breaker(CLOCK), ends.segment("t")
    for _ in range(FAILURES):
        got = ends.receive(target, replace(one, connect=no_card), two, breaker=breaker)
        assert ends.same(target, b.segment)
        assert got.lost == {"a": "the card is down"}
        target.drop()
    assert not breaker.rests("a")
    with pytest.raises(LocalFault, match="no holder is left: the card is down; the card is down"):
        ends.receive(target, replace(one, connect=no_card), replace(two, connect=no_card))


def test_a_connection_is_closed_before_its_chunks_go_to_others(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    (a, one), (_, two) = ends.source("a"), ends.source("b")
    said: list[str] = []
    close, give_back = TcpReader.close, Board.give_back

    def closing(reader: TcpReader) -> None:
        said.append(f"closed {reader.source}")
        close(reader)

    def giving(board: Board, numbers: Iterable[int]) -> None:
        said.append("given back")
        give_back(board, numbers)

    monkeypatch.setattr(TcpReader, "close", closing)
    monkeypatch.setattr(Board, "give_back", giving)
    count = len(cut(ends.first.tensors))
    ends.receive(
        ends.segment("t"), replace(one, queue=tuple(range(count))), replace(two, reserve=True), planned_seconds=60.0,
        on_progress=lambda progress: a.close(0.0),
    )  # fmt: skip
    assert said.index("closed a") < said.index("given back")


def test_a_holder_that_is_far_slower_than_another_is_left(ends: Ends) -> None:
    (_, fast), (_, slow) = ends.source("a"), ends.source("b", pace=Pace(100_000.0, CLOCK))
    target = ends.segment("t")
    count = len(cut(ends.first.tensors))
    got = ends.receive(target, replace(fast, queue=tuple(range(1, count))), replace(slow, queue=(0,)))
    assert "b is too slow" in got.lost["b"] or "b: stalled" in got.lost["b"]
    assert got.holders["a"] == ends.first.weight_bytes


def test_a_receiver_serves_what_it_has_while_it_receives(ends: Ends) -> None:
    source, origin = ends.source("a")
    count = len(cut(ends.first.tensors))
    middle, last = ends.segment("m"), ends.segment("l")
    relay, holder = ends.relay("m", middle)
    results: list[Received] = []
    everything = replace(holder, queue=tuple(range(count)))
    thread = threading.Thread(
        target=lambda: results.append(ends.receive(last, replace(everything), origin, planned_seconds=60.0))
    )
    # The last one asks before the middle one has begun: it waits for each chunk.
    thread.start()
    ends.receive(middle, origin, relay=relay)
    thread.join(30)
    assert ends.same(middle, source.segment)
    assert ends.same(last, source.segment)
    assert results[0].holders == {"m": ends.first.weight_bytes, "a": 0}


def test_a_relay_whose_own_refill_never_begins_is_left_for_the_origin(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.05)
    source, origin = ends.source("a")
    middle, last = ends.segment("m"), ends.segment("l")
    _, holder = ends.relay("m", middle)
    got = ends.receive(last, replace(holder, queue=(0, 1, 2)), origin, planned_seconds=60.0)
    assert ends.same(last, source.segment)
    assert "does not know yet what it receives" in got.lost["m"]


def test_a_chunk_that_a_relay_has_not_got_comes_from_elsewhere(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.05)
    source, origin = ends.source("a")
    middle, last = ends.segment("m"), ends.segment("l")
    relay, holder = ends.relay("m", middle)
    chunks = cut(ends.first.tensors)
    relay.relay(ends.first, chunks, Bitmap(len(chunks)))
    got = ends.receive(last, replace(holder, queue=(0, 1)), replace(origin, queue=tuple(range(2, len(chunks)))))
    assert ends.same(last, source.segment)
    assert got.holders["m"] == 0


def test_a_source_that_dies_when_every_chunk_has_left_it_once_is_not_missed(ends: Ends) -> None:
    source, origin = ends.source("a")
    chunks = cut(ends.first.tensors)
    halves = tuple(range(0, len(chunks), 2)), tuple(range(1, len(chunks), 2))
    segments = [ends.segment(name) for name in "xy"]
    relays = [ends.relay(name, segment) for name, segment in zip("xy", segments, strict=True)]
    got: dict[int, Received] = {}
    left = [sum(chunks[n].bytes for n in half) for half in halves]
    given = threading.Barrier(2, action=lambda: source.close(0.0))

    def receive(n: int) -> None:
        waits = True

        def placed(progress: Progress) -> None:
            nonlocal waits
            # Each half is at one of the two: from here on they have nobody but each other.
            if waits and progress.holders["a"] == left[n]:
                waits = False
                given.wait(30)

        other = replace(relays[1 - n][1], queue=halves[1 - n])
        got[n] = ends.receive(
            segments[n], replace(origin, queue=halves[n]), other, relay=relays[n][0], planned_seconds=600.0,
            on_progress=placed,
        )  # fmt: skip

    threads = [threading.Thread(target=receive, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [got[n].holders["a"] for n in range(2)] == left
    assert all(ends.same(segment, source.segment) for segment in segments)


def test_what_nobody_has_is_given_up_soon_after_the_last_source(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.02)
    monkeypatch.setattr("relight.transfer.stream.ORPHANED_SECONDS", 0.1)
    source, origin = ends.source("a")
    relay, holder = ends.relay("m", ends.segment("m"))
    chunks = cut(ends.first.tensors)
    relay.relay(ends.first, chunks, Bitmap(len(chunks)))
    everything = replace(holder, queue=tuple(range(1, len(chunks))))
    with pytest.raises(ModelDirty, match=r"m received nothing new for 0\.1 s"):
        ends.receive(
            ends.segment("t"), replace(origin, queue=(0,)), everything, planned_seconds=600.0,
            on_progress=lambda progress: source.close(0.0),
        )  # fmt: skip


def test_a_relay_is_heard_after_a_source_and_never_in_its_stead(ends: Ends) -> None:
    ends.source("a")
    relay, holder = ends.relay("m", ends.segment("m"))
    chunks = cut(ends.first.tensors)
    relay.relay(replace(ends.first, scalars={"odd": 1.0}), chunks, Bitmap(len(chunks)))
    _, gone = ends.source("b")

    def never() -> Reader:
        raise RemoteFault("b is gone")

    with pytest.raises(RemoteFault, match="b is gone"):
        ends.receive(ends.segment("t"), holder, replace(gone, connect=never))


def test_several_receivers_fetch_what_a_lost_holder_leaves_each_from_another_end() -> None:
    first = []
    for turn in range(4):
        board = Board([1] * 40, Bitmap(40), {"gone": range(40)}, VirtualClock(), turn=turn / 4)
        board.leave("gone")
        first.append((board.take("a", 1) or [])[0])
    assert first == [0, 10, 20, 30]


def test_holders_that_lend_are_no_measure_of_those_that_send(ends: Ends, tmp_path: Path) -> None:
    (a, near), (_, afar) = ends.source("a"), ends.source("b", pace=Pace(400_000.0, CLOCK))
    count = len(cut(ends.first.tensors))
    listener = ShmListener(tmp_path / "s")
    address = listener.register(a)
    ends.stack.callback(listener.release)
    grant = grants.mint(a._key, grants.Claims("a", 1, "", "i-receiver", CLOCK.now() + 60))
    lends = replace(near, connect=lambda: ShmReader(address, grant, "a", 5.0), queue=tuple(range(1, count)))
    # More than half a second for a chunk: long after the other one, whose bytes need no sending, has brought all else.
    got = ends.receive(ends.segment("t"), lends, replace(afar, queue=(0,)), planned_seconds=600.0)
    assert not got.lost
    assert got.holders["b"]


def test_a_source_that_is_slower_than_a_relay_is_not_left_for_it(ends: Ends) -> None:
    source, slow = ends.source("a", pace=Pace(250_000.0, CLOCK))
    middle = ends.segment("m")
    relay, holder = ends.opened(Source("m", middle, None, CLOCK, Pace(4_000_000.0, CLOCK)))
    chunks = cut(ends.first.tensors)
    middle.populate(0, middle.bytes)
    middle.view[:] = source.segment.view
    everything = Bitmap(len(chunks))
    for chunk in chunks:
        everything.add(chunk.number)
    relay.relay(ends.first, chunks, everything)
    quick = replace(holder, queue=tuple(range(1, len(chunks))), partial=True)
    got = ends.receive(ends.segment("t"), replace(slow, queue=(0,)), quick, planned_seconds=600.0)
    assert not got.lost
    assert got.holders["a"] == chunks[0].bytes


def test_a_relay_serves_no_byte_that_it_has_not_proven(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.transfer.source.RELAY_SECONDS", 0.0)
    ends.source("a")
    chunks = cut(ends.first.tensors)
    relay, _ = ends.relay("m", ends.segment("m"))
    placed = Bitmap(len(chunks))
    placed.add(0)
    relay.relay(ends.first, chunks, placed)
    grant = grants.mint(relay._key, grants.Claims("m", 1, "", "i-receiver", CLOCK.now() + 60))
    pin = relay.admit(grant)
    relay.permit(pin, 0, chunks[0].bytes, 0, 1)
    with pytest.raises(InvalidInput, match="lies outside chunks"):
        relay.permit(pin, chunks[0].bytes, 1, 0, 1)
    with pytest.raises(InvalidInput, match="do not exist"):
        relay.permit(pin, 0, 1, 0, len(chunks) + 1)
    with pytest.raises(Exception, match="has not arrived"):
        relay.permit(pin, chunks[0].bytes, 1, 1, 1)


def test_a_reserve_is_not_even_connected_before_all_others_are_lost(ends: Ends) -> None:
    (a, one), (b, two) = ends.source("a"), ends.source("b")
    target = ends.segment("t")
    got = ends.receive(target, one, replace(two, reserve=True))
    assert (got.holders["b"], b.readers, dict(got.lost)) == (0, 0, {})
    got = ends.receive(
        ends.segment("u"), one, replace(two, reserve=True), on_progress=lambda progress: a.close(0.0)
    )  # fmt: skip
    assert got.holders["b"] > 0
    assert "cut this reader" in got.lost["a"]


def test_without_a_holder_nothing_is_touched(ends: Ends) -> None:
    ends.source("a")
    with pytest.raises(RemoteFault, match="no holder"):
        ends.receive(ends.segment("t"))


def test_a_source_rests_after_failures_and_is_tried_again_afterwards() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.failed("s")
    assert not breaker.rests("s")
    breaker.failed("s")
    assert breaker.rests("s") == REST_SECONDS
    clock.advance(REST_SECONDS)
    assert not breaker.rests("s")
    breaker.failed("s")
    assert breaker.rests("s")
    breaker.succeeded("s")
    assert not breaker.rests("s")


def test_a_resting_source_is_asked_only_when_nobody_else_has_everything(ends: Ends) -> None:
    (_, one), (_, two) = ends.source("a"), ends.source("b")
    breaker = Breaker(CLOCK)
    for _ in range(FAILURES):
        breaker.failed("a")
    target = ends.segment("t")
    assert set(ends.receive(target, one, two, breaker=breaker).holders) == {"b"}
    assert set(ends.receive(ends.segment("u"), one, breaker=breaker).holders) == {"a"}


def test_a_pace_spreads_bytes_over_time_in_the_order_of_the_calls() -> None:
    clock = VirtualClock()
    pace = Pace(1000.0, clock)
    assert pace.delay(500) == 0.0
    assert pace.delay(500) == pytest.approx(0.5)
    assert pace.delay(1) == pytest.approx(1.0)
    clock.advance(60.0)
    assert pace.delay(500) == 0.0
    assert Pace(None, clock).delay(1 << 40) == 0.0
    with pytest.raises(InvalidInput, match="above 0"):
        Pace(0.0, clock)


def test_no_chunk_is_given_twice_and_what_comes_back_is_given_again() -> None:
    board = Board([1] * 10, Bitmap(10), {"a": range(5), "b": range(5, 10)}, VirtualClock())
    taken = [n for _ in range(5) for n in board.take("a", 100) or ()]
    board.leave("b")
    while len(taken) < 10:
        taken += board.take("a", 100) or ()
    assert sorted(taken) == list(range(10))
    board.give_back([3])
    assert board.take("c", 100) == [3]
    for n in range(10):
        board.put(n)
    assert board.take("a", 100) is None


def test_nobody_takes_from_anothers_queue_before_the_plans_time_is_over() -> None:
    clock = VirtualClock()
    board = Board([1] * 4, Bitmap(4), {"a": range(4)}, clock, planned_seconds=5.0)
    clock.advance(5.0)
    assert board.take("b", 100) == []
    clock.advance(5.0 * (PATIENCE - 1))
    assert board.take("b", 100) == [3]


def test_the_plans_time_runs_from_when_bytes_can_come() -> None:
    clock = VirtualClock()
    board = Board([1] * 4, Bitmap(4), {"a": range(4)}, clock, planned_seconds=5.0)
    # Bringing pages back took longer than the plan has for bytes.
    clock.advance(5.0 * PATIENCE)
    board.begin()
    assert board.take("b", 100) == []


def test_a_bitmap_of_another_length_is_refused() -> None:
    assert Bitmap(9, Bitmap(9).dump()).missing() == list(range(9))
    with pytest.raises(InvalidInput, match="has 2 bytes, got 1"):
        Bitmap(9, b"\0")
