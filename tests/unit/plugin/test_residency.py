"""The engine's own safety catch: what may follow a sleep, whatever it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.core import failpoints
from relight.core.errors import Conflict, InvalidInput, LocalFault, ModelDirty, RemoteFault
from relight.core.records import Mode, RungKind, SourceRef
from relight.plugin.orders import Order
from relight.plugin.residency import Residence
from relight.plugin.settings import Card, Settings, read
from relight.transfer import grants
from relight.transfer.transports import rdma
from support.weights import CANARY, Engine
from tests.unit.transfer.conftest import LAYOUT
from tests.unit.transfer.fake_verbs import FakeDevice, FakeMemory

DEADLINE = 10.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    source, sleeper = Engine("i-a", tmp_path / "a"), Engine("i-b", tmp_path / "b")
    yield source, sleeper
    for engine in (source, sleeper):
        engine.residency.close_source(0.0)


def test_sleep_gives_weights_and_cache_back_and_wake_without_refill_is_refused(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    assert sleeper.segment.resident_bytes() == 0
    assert sleeper.dropped == 1
    with pytest.raises(Conflict, match="a refill must precede the wake"):
        sleeper.residency.resume()
    assert sleeper.residency.state is Residence.ASLEEP


@pytest.mark.parametrize("kind", [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK])
def test_a_level_2_sleeper_comes_back_with_the_same_bytes_by_any_rung(pair, kind: RungKind) -> None:
    source, sleeper = pair
    shm, tcp, grant = source.offer()
    sleeper.residency.sleep(2)
    sleeper.wake(kind, address=shm if kind is RungKind.PEER_SHM else tcp, grant=grant)
    sleeper.residency.resume()
    assert sleeper.segment.view == source.segment.view
    assert sleeper.residency.source.manifest.content_digest() == source.residency.source.manifest.content_digest()
    assert sleeper.residency.source.manifest.canary == CANARY
    assert sleeper.rebuilt == (0 if kind is RungKind.DISK else 1)


@pytest.mark.parametrize("kind", [RungKind.PEER_SHM, RungKind.PEER_TCP])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rung_with_a_helper_comes_about_when_either_source_is_gone(
    pair, tmp_path: Path, kind: RungKind, dead: int
) -> None:
    source, sleeper = pair
    helper = Engine("i-c", tmp_path / "c")
    offers = [source.offer(), helper.offer()]
    (source, helper)[dead].residency.close_source(0.0)
    sleeper.residency.sleep(2)
    peers = tuple(
        SourceRef(name, "a", 1, "", "", shm if kind is RungKind.PEER_SHM else tcp, grant)
        for name, (shm, tcp, grant) in zip(("i-a", "i-c"), offers, strict=True)
    )
    got = sleeper.residency.refill(Order(kind, "r1", peers), lambda progress: None)
    sleeper.residency.resume()
    assert sleeper.segment.view == source.segment.view
    assert f"{kind} from {('i-a', 'i-c')[1 - dead]}" in got.detail
    helper.residency.close_source(0.0)


def test_level_1_keeps_a_host_copy_and_comes_back_from_it_alone(pair) -> None:
    _, sleeper = pair
    before = bytes(sleeper.segment.view)
    sleeper.residency.sleep(1)
    assert sleeper.segment.resident_bytes() == 0
    assert sleeper.residency.host_copy_bytes > 0
    sleeper.wake(RungKind.HOST_COPY)
    sleeper.residency.resume()
    assert bytes(sleeper.segment.view) == before
    assert sleeper.residency.host_copy_bytes == 0


def test_there_is_no_host_copy_after_level_2(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    with pytest.raises(LocalFault, match="slept at level 2"):
        sleeper.wake(RungKind.HOST_COPY)


def test_a_woken_sleeper_is_a_source_for_the_next(pair, tmp_path: Path) -> None:
    source, middle = pair
    shm, _, grant = source.offer()
    middle.residency.sleep(2)
    middle.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    middle.residency.resume()
    last = Engine("i-c", tmp_path / "c")
    last.residency.sleep(2)
    _, tcp, onward = middle.offer()
    last.wake(RungKind.PEER_TCP, address=tcp, grant=onward)
    last.residency.resume()
    assert last.segment.view == source.segment.view


def test_altered_bytes_leave_the_sleeper_asleep_and_the_next_rung_brings_it_back(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sleeper = pair
    shm, tcp, grant = source.offer()
    sleeper.residency.sleep(2)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=1*corrupt"))
    with pytest.raises(ModelDirty, match=r"tensor t\d from i-a"):
        sleeper.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    with pytest.raises(Conflict, match="a refill must precede"):
        sleeper.residency.resume()
    sleeper.wake(RungKind.PEER_TCP, address=tcp, grant=grant)
    sleeper.residency.resume()
    assert sleeper.segment.view == source.segment.view


def test_a_checkpoint_that_is_not_what_the_revision_was_is_refused_naming_the_tensor(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    data = bytearray(sleeper.checkpoint.read_bytes())
    data[5] ^= 1
    sleeper.checkpoint.write_bytes(data)
    with pytest.raises(ModelDirty, match=r"tensor t0 read from .* revision 'r1' had"):
        sleeper.wake(RungKind.DISK)
    with pytest.raises(Conflict):
        sleeper.residency.resume()


def test_a_checkpoint_that_cannot_be_read_is_this_sides_fault(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    with pytest.raises(ModelDirty, match="FileNotFoundError") as caught:
        sleeper.wake(RungKind.DISK, path="/nowhere")
    assert isinstance(caught.value.cause, LocalFault)


def test_another_revision_is_refused_by_name(pair) -> None:
    source, sleeper = pair
    shm, _, grant = source.offer()
    sleeper.residency.sleep(2)
    with pytest.raises(RemoteFault, match=r"content\.revision: 'r2' asked for, 'r1' there"):
        sleeper.wake(RungKind.PEER_SHM, address=shm, grant=grant, revision="r2")


@pytest.mark.parametrize("name", ["dtype", "engine", "quantization"])
def test_another_layout_is_refused_by_name(tmp_path: Path, name: str) -> None:
    source = Engine("i-a", tmp_path / "a", {**LAYOUT, name: "theirs"})
    sleeper = Engine("i-b", tmp_path / "b")
    shm, _, grant = source.offer()
    sleeper.residency.sleep(2)
    with pytest.raises(RemoteFault, match=f"layout.{name}: .* 'theirs' there"):
        sleeper.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    source.residency.close_source(0.0)


def test_host_scalars_come_along(pair) -> None:
    source, sleeper = pair
    shm, _, grant = source.offer()
    sleeper.residency.sleep(2)
    sleeper.scalars = {"layer.k_scale": 1.0}
    sleeper.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    assert sleeper.scalars == {"layer.k_scale": 0.5}


def test_an_awake_member_is_never_overwritten(pair) -> None:
    source, awake = pair
    shm, _, grant = source.offer()
    before = bytes(awake.segment.view)
    with pytest.raises(Conflict, match="the member is awake"):
        awake.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    assert bytes(awake.segment.view) == before


def test_a_sleeper_is_no_source(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    with pytest.raises(Conflict, match="asleep cannot be a source"):
        sleeper.residency.open_source(grants.new_key())


def test_a_source_with_readers_does_not_sleep(pair) -> None:
    source, _ = pair
    _, _, grant = source.offer()
    pin = source.residency.source.admit(grant)
    with pytest.raises(Conflict, match="still has readers"):
        source.residency.sleep(2)
    source.residency.source.release(pin)
    source.residency.close_source(1.0)
    source.residency.sleep(2)


def test_reopening_makes_old_grants_void(pair) -> None:
    source, sleeper = pair
    _, _, old = source.offer()
    shm, _, _ = source.offer()
    sleeper.residency.sleep(2)
    with pytest.raises(RemoteFault, match="not signed for this source"):
        sleeper.wake(RungKind.PEER_SHM, address=shm, grant=old)


@pytest.mark.parametrize("level", [0, 3, -1])
def test_a_sleep_level_that_is_none_is_refused(pair, level: int) -> None:
    with pytest.raises(InvalidInput, match="sleep level 1 or 2"):
        pair[1].residency.sleep(level)


def test_sleeping_twice_is_sleeping_once_and_another_level_is_a_conflict(pair) -> None:
    _, sleeper = pair
    sleeper.residency.sleep(2)
    sleeper.residency.sleep(2)
    with pytest.raises(Conflict, match="cannot go to sleep at level 1"):
        sleeper.residency.sleep(1)


def test_a_suspended_wake_gives_its_memory_back(pair) -> None:
    source, sleeper = pair
    shm, _, grant = source.offer()
    sleeper.residency.sleep(2)
    sleeper.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    sleeper.residency.suspend()
    assert sleeper.segment.resident_bytes() == 0
    with pytest.raises(Conflict):
        sleeper.residency.resume()


@pytest.mark.parametrize("kind", [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK])
def test_an_engine_that_awaits_its_weights_goes_on_once_a_rung_brought_them(pair, tmp_path: Path, kind) -> None:
    source, _ = pair
    shm, tcp, grant = source.offer()
    starting = Engine("i-c", tmp_path / "c", mode=Mode.NORMAL)
    went_on = threading.Event()

    def engine() -> None:
        starting.residency.fill(DEADLINE)
        starting.residency.settle()
        went_on.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert starting.residency.state is Residence.ASLEEP
    path = str(source.checkpoint)
    starting.wake(kind, address=shm if kind is RungKind.PEER_SHM else tcp, grant=grant, path=path)
    thread.join(DEADLINE)
    assert went_on.is_set()
    assert starting.residency.state is Residence.AWAKE
    assert starting.segment.view == source.segment.view
    manifest = starting.residency.source.manifest
    assert manifest.content_digest() == source.residency.source.manifest.content_digest()
    assert manifest.canary == (None if kind is RungKind.DISK else CANARY)
    starting.offer()
    starting.residency.close_source(0.0)


def test_an_engine_that_awaits_its_weights_is_no_source_and_does_not_resume(tmp_path: Path) -> None:
    starting = Engine("i-c", tmp_path / "c", mode=Mode.LAZY)
    with pytest.raises(Conflict, match="cannot be a source"):
        starting.offer()
    with pytest.raises(Conflict, match="a refill must precede the wake"):
        starting.residency.resume()


def test_an_engine_to_which_no_rung_brings_weights_gives_up(tmp_path: Path) -> None:
    starting = Engine("i-c", tmp_path / "c", mode=Mode.NORMAL)
    with pytest.raises(LocalFault, match=r"no weights were brought within 0\.01 s"):
        starting.residency.fill(0.01)


def test_a_start_that_writes_into_its_weights_after_they_were_proven_is_refused_by_name(pair, tmp_path: Path) -> None:
    source, _ = pair
    shm, _, grant = source.offer()
    starting = Engine("i-c", tmp_path / "c", mode=Mode.NORMAL)
    starting.wake(RungKind.PEER_SHM, address=shm, grant=grant)
    starting.residency.fill(DEADLINE)
    starting.segment.view[10] ^= 1
    with pytest.raises(LocalFault, match="was changed by the start itself"):
        starting.residency.settle()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RELIGHT_MODE", "fast"), ("RELIGHT_START_SECONDS", "soon"), ("RELIGHT_START_SECONDS", "0"),
        ("RELIGHT_DIGESTS", "md5"), ("RELIGHT_DIGESTS", ""),
    ],
)  # fmt: skip
def test_a_setting_that_is_none_is_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    given = {"RELIGHT_INSTANCE": "i", "RELIGHT_ENGINE_DIR": str(tmp_path), "RELIGHT_BIND_HOST": "::1", name: value}
    with pytest.raises(InvalidInput, match=name):
        read(given)


def test_an_engine_without_an_agent_says_what_is_missing() -> None:
    with pytest.raises(InvalidInput, match="RELIGHT_ENGINE_DIR"):
        read({"RELIGHT_INSTANCE": "i", "RELIGHT_BIND_HOST": "127.0.0.1"})
    with pytest.raises(InvalidInput, match="RELIGHT_STREAMS: expected a number from 1 to 64"):
        read({"RELIGHT_INSTANCE": "i", "RELIGHT_BIND_HOST": "h", "RELIGHT_ENGINE_DIR": "/x", "RELIGHT_STREAMS": "0"})
    with pytest.raises(InvalidInput, match="RELIGHT_SOURCE_RATE: expected bytes per second, at least 1"):
        read(
            {"RELIGHT_INSTANCE": "i", "RELIGHT_BIND_HOST": "h", "RELIGHT_ENGINE_DIR": "/x", "RELIGHT_SOURCE_RATE": "0"}
        )


def test_the_fleets_histogram_is_read_in_the_order_of_its_tokens(tmp_path: Path) -> None:
    environ = {"RELIGHT_INSTANCE": "i", "RELIGHT_ENGINE_DIR": str(tmp_path), "RELIGHT_BIND_HOST": "h"}
    assert read(environ).sizes == ()
    assert read(environ | {"RELIGHT_SIZES": '{"16": 3, "1": 0.5}'}).sizes == ((1, 0.5), (16, 3.0))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{", '{"x": 1}', '{"0": 1}', '{"-1": 1}', '{"01": 1}', '{"1": -1}', '{"1": true}', '{"1": "2"}',
     '{"1": NaN}', '{"1": Infinity}', '{"1": {}}', '{"1": 1, "1": 2}', '{"\u0661": 1}', f'{{"1": 1{"0" * 400}}}'],
)  # fmt: skip
def test_what_is_not_a_histogram_is_refused_by_name(text: str, tmp_path: Path) -> None:
    environ = {"RELIGHT_INSTANCE": "i", "RELIGHT_ENGINE_DIR": str(tmp_path), "RELIGHT_BIND_HOST": "h"}
    with pytest.raises(InvalidInput) as caught:
        read(environ | {"RELIGHT_SIZES": text})
    assert [e.field for e in caught.value.errors] == ["RELIGHT_SIZES"]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "Device", FakeDevice)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_sleeper_comes_back_by_all_cards_of_both_sides(cards, tmp_path: Path, ours: int, theirs: int) -> None:
    source, sleeper = Engine("i-a", tmp_path / "a", cards=theirs), Engine("i-b", tmp_path / "b", cards=ours)
    addresses, grant = source.offers()
    assert len(addresses["rdma"].split("+")) == theirs
    sleeper.residency.sleep(2)
    said = sleeper.wake(RungKind.PEER_RDMA, address=addresses["rdma"], grant=grant)
    sleeper.residency.resume()
    assert sleeper.segment.view == source.segment.view
    assert "peer_rdma from i-a by mlx5_" in said
    for engine in (source, sleeper):
        engine.residency.close_source(0.0)


def test_a_card_that_takes_no_memory_is_told_and_the_others_serve(
    cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(self: FakeDevice, address: int, length: int, *, writable: bool) -> FakeMemory:
        if self.name == "mlx5_0":
            raise LocalFault("registering memory: out of memory")
        return FakeMemory(address, length)

    monkeypatch.setattr(FakeDevice, "register", register)
    source = Engine("i-a", tmp_path / "a", cards=2)
    opened = source.residency.open_source(grants.new_key())
    assert opened["closed"] == {"rdma": "mlx5_0: registering memory: out of memory"}
    assert "rdma" in opened["addresses"]
    assert "shm" in opened["addresses"]
    source.residency.close_source(0.0)


def test_keys_of_a_source_that_slept_open_nothing_and_new_ones_do(cards, tmp_path: Path) -> None:
    source, sleeper = Engine("i-a", tmp_path / "a", cards=1), Engine("i-b", tmp_path / "b", cards=1)
    addresses, grant = source.offers()
    source.residency.close_source(0.0)
    source.residency.sleep(2)
    sleeper.residency.sleep(2)
    with pytest.raises(RemoteFault):
        sleeper.wake(RungKind.PEER_RDMA, address=addresses["rdma"], grant=grant)
    source.wake(RungKind.DISK)
    source.residency.resume()
    addresses, grant = source.offers()
    sleeper.wake(RungKind.PEER_RDMA, address=addresses["rdma"], grant=grant)
    assert sleeper.segment.view == source.segment.view
    source.residency.close_source(0.0)


def test_the_rdma_rung_without_a_card_is_this_members_fault(pair) -> None:
    source, sleeper = pair
    _, _, grant = source.offer()
    sleeper.residency.sleep(2)
    with pytest.raises(LocalFault, match="without an RDMA card"):
        sleeper.wake(RungKind.PEER_RDMA, address="rdma:127.0.0.1:1", grant=grant)


@pytest.mark.parametrize("text", ["mlx5_0", "mlx5_0@10.0.0.1,mlx5_1"])
def test_a_card_without_an_address_is_refused_by_name(text: str, tmp_path: Path) -> None:
    environ = {"RELIGHT_INSTANCE": "i", "RELIGHT_ENGINE_DIR": str(tmp_path), "RELIGHT_BIND_HOST": "h"}
    with pytest.raises(InvalidInput, match="started by an agent") as caught:
        read(environ | {"RELIGHT_RDMA": text})
    assert [e.field for e in caught.value.errors] == ["RELIGHT_RDMA"]


def test_ranks_take_the_cards_in_turn_and_a_single_one_takes_all() -> None:
    cards = (Card("mlx5_0", "10.0.0.1"), Card("mlx5_1", "10.0.0.2"))
    settings = Settings("i", Path("/x"), "h", "r1", 2, cards=cards)
    assert settings.cards_of(0, 1) == cards
    assert [settings.cards_of(rank, 3)[0].name for rank in range(3)] == ["mlx5_0", "mlx5_1", "mlx5_0"]
    assert Settings("i", Path("/x"), "h", "r1", 2).cards_of(1, 2) == ()


def test_one_card_reads_the_sources_second_one_when_the_first_is_gone(cards, tmp_path: Path) -> None:
    source, sleeper = Engine("i-a", tmp_path / "a", cards=2), Engine("i-b", tmp_path / "b", cards=1)
    addresses, grant = source.offers()
    first, second = addresses["rdma"].split("+")
    gone = "rdma:127.0.0.1:1"
    sleeper.residency.sleep(2)
    said = sleeper.wake(RungKind.PEER_RDMA, address=f"{gone}+{second}", grant=grant)
    sleeper.residency.resume()
    assert first != second
    assert sleeper.segment.view == source.segment.view
    assert f"from i-a by mlx5_0 to {second.removeprefix('rdma:')}" in said
    assert "lost i-a by mlx5_0 to 127.0.0.1:1" in said
    source.residency.close_source(0.0)
